"""Anatomy of the models of transformers (4.x and 5.x) and torchvision: every record against what its model does."""

import importlib.util
import math
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torchvision
from torchvision.models import swin_transformer

from vitfocus.anatomy import anatomy, families
from vitfocus.anatomy import torchvision as torchvision_families
from vitfocus.anatomy import transformers as transformers_families
from vitfocus.attention.capture import observing

transformers = importlib.import_module("transformers") if importlib.util.find_spec("transformers") else None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed (extra 'hf')")

HF = {family.name: family for family in families() if family.library == "transformers"}
PLAIN = {family.name: family for family in families() if family.library == "torchvision"}
SECOND_NORM = ("layernorm_after", "norm2", "layer_norm2", "layer_norm_2", "rms_norm2", "ln_2")
TEXT_TOKENS = 5

#: Sizes that a family's example takes besides its own. PVT reshapes its position embedding, so the area must stay.
SIZES = {
    "swin": [(60, 90), (64, 96)],
    "swinv2": [(60, 90), (64, 96)],
    "donut_swin": [(60, 90), (64, 96)],
    "maskformer_swin": [(60, 90), (64, 96)],
    "aimv2": [],
    "pvt": [(32, 128)],
    "pvt_v2": [(64, 96), (70, 101)],
    "segformer": [(64, 96), (70, 101)],
    "glpn": [(64, 96), (70, 101)],
    "vision_transformer": [],
    "swin_transformer": [(60, 90), (64, 96)],
    "swin_transformer_v2": [(60, 90), (64, 96)],
}
INTERPOLATES = {"vit", "deit", "beit", "data2vec_vision", "clip", "siglip", "vit_msn", "ijepa"}
INTERPOLATES |= {"altclip", "chinese_clip", "metaclip_2", "clipseg", "owlvit", "owlv2", "git", "blip", "blip_2"}
INTERPOLATES |= {"flava", "instructblip"}

CASES = [pytest.param(name, id=f"transformers-{name}", marks=needs_transformers) for name in HF]
#: MaxViT keeps its tokens in windows throughout, so it has a test of its own.
CASES += [pytest.param(name, id=f"torchvision-{name}") for name in [*PLAIN, "swin_transformer_v2"] if name != "maxvit"]


def build(name, **options):
    torch.manual_seed(0)
    if name == "swin_transformer_v2":
        model = swin_transformer.SwinTransformer(
            **PLAIN["swin_transformer"].options,
            block=swin_transformer.SwinTransformerBlockV2,
            downsample_layer=swin_transformer.PatchMergingV2,
        )
    elif name in PLAIN:
        model = torchvision_families.build_example(PLAIN[name])
    elif not hasattr(transformers, HF[name].example):
        pytest.skip(f"transformers {transformers.__version__} has no {HF[name].example}")
    elif options:
        cls = getattr(transformers, HF[name].example)
        model = cls(cls.config_class(**HF[name].options | options))
    else:
        model = transformers_families.build_example(HF[name])
    # Biases and position embeddings start at zero, which would hide a port that is in the wrong place.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def run(name, model, size, **more):
    """The model's main output for random images of that size."""
    torch.manual_seed(1)
    images = torch.randn(2, 3, *size)
    if name in INTERPOLATES:
        more["interpolate_pos_encoding"] = True
    if name == "vilt":
        more |= {"input_ids": torch.randint(0, 50, (2, TEXT_TOKENS)), "pixel_mask": torch.ones(2, *size)}
        more["pixel_values"] = images
        images = None
    with torch.no_grad():
        output = model(images, **more) if images is not None else model(**more)
    return output


def main_tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def own_size(name, blocks):
    return (64, 64) if name.startswith(("swin", "segformer", "glpn")) else blocks.build_size


@contextmanager
def changed(port, change):
    """Within the context, `change` is applied to the tokens at a port, after those of the contexts around it."""
    if port.side in ("input", "output"):
        if port.side == "input":
            handle = port.module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        else:
            handle = port.module.register_forward_hook(lambda module, args, output: change(output))
        try:
            yield
        finally:
            handle.remove()
        return
    stand_in = port.module.__dict__.get(port.side) or Method(getattr(port.module, port.side))
    port.module.__dict__[port.side] = stand_in
    stand_in.changes.append(change)
    try:
        yield
    finally:
        stand_in.changes.remove(change)
        if not stand_in.changes:
            del port.module.__dict__[port.side]


class Method:
    """Stands in for a method and applies changes to its first argument."""

    def __init__(self, method):
        self.method = method
        self.changes = []

    def __call__(self, tokens, *args, **kwargs):
        for change in self.changes:
            tokens = change(tokens)
        return self.method(tokens, *args, **kwargs)


@contextmanager
def seen(port):
    tokens = []
    with changed(port, lambda x: tokens.append(x.clone()) or x):
        yield tokens


class Steps:
    """What one block receives, what its MLP's branch starts from, and what the block returns."""

    def __init__(self, name, model, block, size, **changes):
        with ExitStack() as stack:
            second = next(norm for norm in SECOND_NORM if hasattr(block.host, norm))
            if "v2" in name and "swin" in name:  # The norm follows the MLP: its branch starts at the MLP's input.
                handle = block.mlp.register_forward_pre_hook(self._middle)
            else:
                handle = getattr(block.host, second).register_forward_pre_hook(self._middle)
            stack.callback(handle.remove)
            for key, change in changes.items():
                stack.enter_context(changed(block.ports[key.replace("__", ".")], change))
            keep = {key: stack.enter_context(seen(port)) for key, port in block.ports.items()}
            handle = block.host.register_forward_hook(self._block, with_kwargs=True)
            stack.callback(handle.remove)
            run(name, model, size)
        self.ports = {key: tokens[0] for key, tokens in keep.items()}
        assert all(len(tokens) == 1 for tokens in keep.values()), "a port is passed once a block"

    def _block(self, module, args, kwargs, output):
        self.start = (args[0] if args else kwargs["hidden_states"]).clone()
        self.end = main_tensor(output).clone()

    def _middle(self, module, args):
        self.middle = args[0].clone()


def zero(tokens):
    return tokens * 0


def same_for_all_tokens(tokens):
    tokens = tokens.flatten(1, -2)
    return torch.allclose(tokens, tokens[:, :1].expand_as(tokens), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_where_their_names_say_and_ports_carry_all_tokens(name):
    model = build(name)
    blocks = anatomy(model)
    size = own_size(name, blocks)
    assert [block.depth for block in blocks] == list(range(len(blocks)))
    for block in blocks:
        assert model.get_submodule(block.name) is block.host
        absent = {"attention.mid"} if block.window or block.reader == "multihead" else set()
        absent |= {"pool"} if name == "vilt" else set()
        sites = {f"{part}.{place}" for part in ("attention", "mlp") for place in ("front", "mid", "end")}
        assert set(block.ports) == (sites | {"pool"}) - absent
        steps = Steps(name, model, block, size)
        rows, columns = block.grid(size)
        for key, port in block.ports.items():
            tokens = steps.ports[key]
            assert tokens.shape[-1] == port.width, key
            if port.layout == "BHWC":
                assert tokens.shape[:3] == (2, rows, columns), key
            else:
                text = TEXT_TOKENS if name == "vilt" else 0
                assert tokens.shape[:2] == (2, text + block.prefix_tokens + rows * columns), key
        assert block.width == steps.start.shape[-1] == block.ports["mlp.end"].width
        assert steps.ports["mlp.mid"].shape[-1] > block.width


@pytest.mark.parametrize("name", CASES)
def test_branches_end_before_the_shortcut_is_added(name):
    model = build(name)
    blocks = anatomy(model)
    post_norm = "v2" in name and "swin" in name
    for block in blocks:
        size = own_size(name, blocks)
        plain = Steps(name, model, block, size)
        cut = Steps(name, model, block, size, mlp__end=zero)
        assert not torch.allclose(cut.middle, plain.end)
        assert torch.equal(cut.middle, plain.middle)
        if post_norm:  # The norm of nothing is its bias.
            assert same_for_all_tokens(cut.end - cut.middle)
        else:
            assert torch.equal(cut.end, cut.middle)
        cut = Steps(name, model, block, size, attention__end=zero)
        assert not torch.allclose(plain.middle, cut.start)
        if post_norm:
            assert same_for_all_tokens(cut.middle - cut.start)
        else:
            assert torch.equal(cut.middle, cut.start)


@pytest.mark.parametrize("name", CASES)
def test_front_and_middle_feed_the_branch_and_nothing_else(name):
    model = build(name)
    blocks = anatomy(model)
    for block in blocks:
        size = own_size(name, blocks)
        for key in block.ports:
            part, _, place = key.partition(".")
            if place == "end":
                continue
            branch = "attention" if part == "pool" else part
            cut = Steps(name, model, block, size, **{key.replace(".", "__"): zero})
            convolved = hasattr(block.mlp, "dwconv") and key == "mlp.front"
            # Tokens that are all alike come out alike, but for the border of a convolution.
            assert convolved or same_for_all_tokens(cut.ports[f"{branch}.end"]), key
            changes = {key.replace(".", "__"): torch.randn_like, f"{branch}__end": zero}
            lone = Steps(name, model, block, size, **changes)
            kept = Steps(name, model, block, size, **{f"{branch}__end": zero})
            assert torch.equal(lone.middle, kept.middle) and torch.equal(lone.end, kept.end), key


@pytest.mark.parametrize("name", CASES)
def test_grids_match_the_attention_that_happens(name):
    model = build(name)
    blocks = anatomy(model)
    for size in [own_size(name, blocks), *SIZES.get(name, [(32, 48), (40, 24)])]:
        maps, images = {}, []
        hook = blocks.stem.register_forward_pre_hook(lambda module, args: images.append(args[0].shape))  # noqa: B023
        before = main_tensor(run(name, model, size))
        with observing(blocks, lambda block, attention: maps.update({block.depth: attention.shape})):  # noqa: B023
            during = main_tensor(run(name, model, size))
        hook.remove()
        assert torch.equal(before, during)
        assert images == [(2, 3, *size)] * 2, "the stem meets the image as it is, positionally"
        assert set(maps) == set(range(len(blocks)))
        for block in blocks:
            queries, keys = (math.prod(grid) for grid in block.attention_grids(size))
            prefix = block.prefix_tokens + (TEXT_TOKENS if name == "vilt" else 0)
            batch, _, *seen_shape = maps[block.depth]
            assert seen_shape == [queries + prefix, keys + prefix]
            windows = 1
            if block.window:
                windows = math.prod(-(-a // b) for a, b in zip(block.grid(size), block.window, strict=True))
            assert batch == 2 * windows


@needs_transformers
@pytest.mark.parametrize("name", HF)
def test_maps_equal_those_the_model_returns(name):
    if name == "clip" and transformers.__version__ < "4.52":
        pytest.skip("before 4.52 CLIP's eager attention folds its heads into the batch, which the probe does not see")
    if name == "maskformer_swin":
        pytest.skip("its encoder fails where it is asked for attentions without hidden states")
    model = build(name, attn_implementation="eager")
    blocks = anatomy(model)
    maps = []
    with observing(blocks, lambda block, attention: maps.append(attention.attention())):
        returned = run(name, model, own_size(name, blocks), output_attentions=True).attentions
    returned = [m for item in returned for m in (item if isinstance(item, tuple) else (item,))]
    if "swin" in name:  # One a stage, its last block's.
        maps = maps[1::2]
    for ours, theirs in zip(maps, returned, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torchvision_maps_equal_those_of_the_attention_module():
    model = build("vision_transformer")
    blocks = anatomy(model)
    inputs, maps = [], []
    for block in blocks:
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with observing(blocks, lambda block, attention: maps.append(attention.attention())):
        run("vision_transformer", model, (32, 32))
    for block, x, ours in zip(blocks, inputs.copy(), maps, strict=True):
        with torch.no_grad():
            _, theirs = block.attention(x, x, x, average_attn_weights=False)
        torch.testing.assert_close(ours, theirs)


def test_torchvision_maxvit():
    model = build("maxvit")
    blocks = anatomy(model)
    assert blocks.build_size == (64, 64) and [block.grid() for block in blocks] == [(16, 16)] * 2 + [(8, 8)] * 2
    assert [block.attention_kind for block in blocks] == ["window", "grid"] * 2
    for block in blocks:
        assert model.get_submodule(block.name) is block.host and block.window == (4, 4)
        assert "pool" not in block.ports
        inputs, maps = [], []
        hook = block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))  # noqa: B023
        with (
            observing([block], lambda block, attention: maps.append(attention.attention())),  # noqa: B023
            seen(block.ports["mlp.front"]) as fronts,
            seen(block.ports["mlp.mid"]) as middles,
            seen(block.ports["mlp.end"]) as ends,
        ):
            run("maxvit", model, (64, 64))
        hook.remove()
        (tokens,), attention = inputs, block.attention
        query, key, _ = attention.to_qkv(tokens).flatten(0, 1).chunk(3, dim=-1)
        query, key = (part.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for part in (query, key))
        scores = query @ key.mT * attention.scale_factor + attention.get_relative_positional_bias()
        torch.testing.assert_close(maps[0], scores.softmax(dim=-1))
        # Every token passes, and the MLP ends before the shortcut is added.
        assert fronts[0].shape[1] * fronts[0].shape[2] == math.prod(block.grid())
        inside = block.host.mlp_layer
        torch.testing.assert_close(inside[2](inside[1](fronts[0])), middles[0])
        torch.testing.assert_close(inside[3](middles[0]), ends[0])


TOWERS = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2},
}
FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}
TASKS = [
    ("vit", "ViTForImageClassification", {}),
    ("vit", "ViTForMaskedImageModeling", {}),
    ("deit", "DeiTForImageClassification", {}),
    ("deit", "DeiTForImageClassificationWithTeacher", {}),
    ("deit", "DeiTForMaskedImageModeling", {}),
    ("beit", "BeitForImageClassification", {}),
    ("beit", "BeitForMaskedImageModeling", {}),
    ("beit", "BeitForSemanticSegmentation", FOUR_LAYERS),
    ("beit", "BeitBackbone", {}),
    ("data2vec_vision", "Data2VecVisionForImageClassification", {}),
    ("data2vec_vision", "Data2VecVisionForSemanticSegmentation", FOUR_LAYERS),
    ("dinov2", "Dinov2ForImageClassification", {}),
    ("dinov2", "Dinov2Backbone", {}),
    ("dinov2", "Dinov2Model", {"use_swiglu_ffn": True}),
    ("dinov2_with_registers", "Dinov2WithRegistersForImageClassification", {}),
    ("dinov2_with_registers", "Dinov2WithRegistersBackbone", {}),
    ("dinov3_vit", "DINOv3ViTModel", {"use_gated_mlp": True}),
    ("dinov3_vit", "DINOv3ViTBackbone", {}),
    ("swin", "SwinForImageClassification", {}),
    ("swin", "SwinForMaskedImageModeling", {}),
    ("swin", "SwinBackbone", {}),
    ("swinv2", "Swinv2ForImageClassification", {}),
    ("swinv2", "Swinv2Backbone", {}),
    ("pvt", "PvtForImageClassification", {}),
    ("pvt_v2", "PvtV2ForImageClassification", {}),
    ("pvt_v2", "PvtV2Backbone", {}),
    ("segformer", "SegformerForImageClassification", {}),
    ("segformer", "SegformerForSemanticSegmentation", {}),
    ("clip", "CLIPVisionModelWithProjection", {}),
    ("clip", "CLIPModel", TOWERS),
    ("clip", "CLIPForImageClassification", TOWERS),
    ("siglip", "SiglipModel", TOWERS),
    ("siglip", "SiglipForImageClassification", TOWERS),
    ("vit_msn", "ViTMSNForImageClassification", {}),
    ("ijepa", "IJepaForImageClassification", {}),
    ("dpt", "DPTForSemanticSegmentation", {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}),
    ("clipseg", "CLIPSegForImageSegmentation", TOWERS),
    ("owlvit", "OwlViTForObjectDetection", TOWERS),
    ("blip", "BlipForImageTextRetrieval", TOWERS),
    ("glpn", "GLPNForDepthEstimation", {}),
    ("vilt", "ViltForMaskedLM", {}),
    ("vilt", "ViltForQuestionAnswering", {}),
    ("vilt", "ViltForImageAndTextRetrieval", {}),
    ("vilt", "ViltForImagesAndTextClassification", {"num_images": 2, "modality_type_vocab_size": 3}),
    ("vilt", "ViltForTokenClassification", {}),
]


@needs_transformers
@pytest.mark.parametrize(
    ("name", "task", "options"), TASKS, ids=[f"{task}-{i}" for i, (_, task, _) in enumerate(TASKS)]
)
def test_task_models_are_dissected_in_their_one_vision_transformer(name, task, options):
    cls = getattr(transformers, task, None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {task}")
    own = HF[name].options
    config = {**options, "vision_config": own} if "text_config" in options else own | options
    model = cls(cls.config_class(**config))
    blocks = anatomy(model)
    assert blocks.family == name
    assert len(blocks) == (sum(own["depths"]) if "depths" in own else config.get("num_hidden_layers", 2))
    for block in blocks:
        assert model.get_submodule(block.name) is block.host
        assert {"mlp.front", "mlp.mid", "mlp.end", "attention.front", "attention.end"} <= set(block.ports)


@needs_transformers
def test_prefix_tokens_and_reductions():
    expected = {
        "vit": [1, 1],
        "deit": [2, 2],
        "siglip": [0, 0],
        "dinov2_with_registers": [5, 5],
        "pvt": [0, 0, 0, 0, 1],
    }
    for name, prefixes in expected.items():
        assert [block.prefix_tokens for block in anatomy(build(name))] == prefixes, name
    linear = anatomy(build("pvt_v2", linear_attention=True))
    assert linear[0].attention_grids((64, 96)) == ((16, 24), (7, 7))
    assert [block.attention_kind for block in anatomy(build("pvt"))] == ["reduced"] * 4 + ["global"]


@needs_transformers
def test_vilt_says_where_its_text_and_its_mask_are():
    model = build("vilt")
    blocks = anatomy(model)
    lengths, masks = [], []
    blocks.text.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    blocks.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    run("vilt", model, (32, 32), attention_mask=torch.tensor([[1] * TEXT_TOKENS, [1, 1, 0, 0, 0]]))
    assert lengths == [TEXT_TOKENS]
    assert masks[0].shape[0] == 2 and masks[0].shape[-1] == TEXT_TOKENS + 1 + 16
    assert len(blocks.notes) == 3


PROCESSORS = {
    "vit": "ViTImageProcessor",
    "beit": "BeitImageProcessor",
    "data2vec_vision": "BeitImageProcessor",
    "pvt": "PvtImageProcessor",
    "pvt_v2": "PvtImageProcessor",
    "segformer": "SegformerImageProcessor",
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "vilt": "ViltImageProcessor",
}


@needs_transformers
@pytest.mark.parametrize("name", PROCESSORS)
def test_normalisation_is_the_image_processors(name):
    """For the families whose processor's defaults are those of the published checkpoints."""
    processor = getattr(transformers, PROCESSORS[name])()
    blocks = anatomy(build(name))
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == (blocks.mean, blocks.std)


def test_torchvision_models_by_their_published_names():
    with torch.device("meta"):
        models = {name: torchvision.models.get_model(name) for name in ("vit_b_32", "swin_t", "swin_v2_t")}
    vit, swin, swin_v2 = (anatomy(model) for model in models.values())
    assert len(vit) == len(swin) == len(swin_v2) == 12
    assert vit[0].grid() == (7, 7) and vit[0].attention_kind == "global"
    assert [block.stage for block in swin] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert swin[-1].grid() == (7, 7) and swin[0].window == (7, 7)
    assert swin_v2[-1].grid() == (8, 8) and swin_v2[0].window == (8, 8)
    for name, model in models.items():
        assert all(model.get_submodule(block.name) is block.host for block in anatomy(model)), name
