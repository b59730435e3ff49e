"""Token-aware Average Pooling against the published arithmetic, and its counts, modes and refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import timm
import torch
from helpers.tiny import build
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import vitfocus as vf
from vitfocus.kernels.backends import backend
from vitfocus.models import FAN, load_published
from vitfocus.treatments.spec import is_record


def pool_by_unfold(image: Tensor, dilation: int) -> Tensor:
    """The released formulation: unfold the nine taps and average them."""
    if dilation == 0:
        return image
    batch, channels, height, width = image.shape
    taps = F.unfold(image, 3, dilation=dilation, padding=dilation)
    return taps.reshape(batch, channels, 9, height, width).mean(2)


def tap_by_hand(predictor: nn.Sequential, image: Tensor, kernel: bool = False) -> Tensor:
    weights = predictor(image).softmax(1)
    if kernel:
        pooled = [image] + [F.avg_pool2d(image, 2 * k + 1, 1, k) for k in range(1, weights.shape[1])]
    else:
        pooled = [pool_by_unfold(image, k) for k in range(weights.shape[1])]
    return sum(weights[:, k : k + 1] * one for k, one in enumerate(pooled))


@pytest.mark.parametrize("name", ["tap_fan_vit", "tap_fan_hybrid"])
def test_published_arithmetic(shared: Path, name: str) -> None:
    with safe_open(shared / f"golden/models/{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    stem = {"stem_depths": config["convnext_depths"], "stem_dims": config["convnext_dims"]} if "hybrid" in name else {}
    model = FAN(
        **{k: config[k] for k in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")}, **stem
    )
    vf.treat_(model.eval(), vf.TokenAwarePooling(branches=config["tap_branches"]))
    report = load_published(model, {k.removeprefix("state."): v for k, v in tensors.items() if k.startswith("state.")})
    assert not report.missing and not report.unexpected
    with torch.no_grad():
        torch.testing.assert_close(model(tensors["input"]), tensors["logits"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["dilation", "kernel"])
@pytest.mark.parametrize("branches", [1, 2, 4, 6])
@pytest.mark.parametrize("family", ["vit_rect", "swin", "swin_v2", "pvt_v2", "deit_distilled"])
def test_module_equals_unfold_on_every_layout(family: str, branches: int, mode: str) -> None:
    model, images = build(family)
    block = vf.anatomy(model)[1]
    vf.treat_(model, vf.TokenAwarePooling(mode=mode, branches=branches))
    module = block.host.dilation_predictor
    seen: dict[str, Tensor] = {}
    module.register_forward_hook(lambda m, args, output: seen.update(given=args[0], got=output))
    with torch.no_grad():
        model(images)
        given, got = seen["given"], seen["got"]
        rows, columns = block.grid(images.shape[-2:])
        prefix = block.prefix_tokens
        image = given[:, prefix:].reshape(2, rows, columns, -1).permute(0, 3, 1, 2)
        expected = tap_by_hand(module.proj, image, mode == "kernel").permute(0, 2, 3, 1)
    torch.testing.assert_close(got[:, prefix:].reshape(expected.shape), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(got[:, :prefix], given[:, :prefix])


@pytest.mark.parametrize("family", ["vit_rect", "swin"])
def test_by_a_matrix_as_by_poolings(family: str) -> None:
    """On a CPU: outputs and gradients, of twice differentiated sums too, after a first pass that kept no gradients."""
    results = []
    for name in ("auto", "reference"):
        model, images = build(family)
        vf.treat_(model, "tap(layers=[1],branches=3)").double()
        module = vf.anatomy(model)[1].host.dilation_predictor
        given: list[Tensor] = []
        hook = module.register_forward_hook(lambda m, args, output, given=given: given.append(args[0].detach()))
        with torch.inference_mode(), backend(name):
            model(images.double())
        hook.remove()
        tokens = given[0].clone().requires_grad_()
        with backend(name):
            pooled = module.train()(tokens)
            inputs = (tokens, *module.parameters())
            slopes = torch.autograd.grad(pooled.square().sum(), inputs, create_graph=True)
            twice = torch.autograd.grad(slopes[0].square().sum(), inputs)
        results.append((pooled, *slopes, *twice))
    for one, other in zip(*results, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Tripled(nn.Module):
    """What peft puts in place of a convolution."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, image: Tensor) -> Tensor:
        return 3 * self.base(image)


@pytest.mark.parametrize("part", [0, 2])
@pytest.mark.parametrize("what", ["wrapped", "hooked", "pruned", "with a bias"])
def test_convolutions_that_do_more_are_called(what: str, part: int) -> None:
    model, images = build("vit_rect")
    vf.treat_(model, "tap(layers=[1],branches=3)").train()
    module = vf.anatomy(model)[1].host.dilation_predictor
    conv = module.proj[part]
    if what == "wrapped":
        module.proj[part] = Tripled(conv)
    elif what == "hooked":
        conv.register_forward_hook(lambda module, args, output: 3 * output)
    elif what == "pruned":
        prune.random_unstructured(conv, "weight", 0.5)
    else:
        conv.bias = nn.Parameter(torch.randn(3))
    for _ in range(2):  # a pruned weight is made anew for every step
        results = []
        for name in ("auto", "reference"):
            with backend(name):
                output = model(images)
                results.append((output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))))
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_shortcut_keeps_the_unpooled_tokens() -> None:
    model, images = build("vit")
    vf.treat_(model, "tap(layers=[0])")
    block = model.blocks[0]
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images))
        image = tokens[:, 1:].transpose(1, 2).reshape(2, -1, 4, 4)
        pooled = tap_by_hand(block.dilation_predictor.proj, image).flatten(2).transpose(1, 2)
        normed = F.layer_norm(
            torch.cat([tokens[:, :1], pooled], 1), (48,), block.norm1.weight, block.norm1.bias, block.norm1.eps
        )
        expected = tokens + block.attn(normed)
        expected = expected + block.mlp(block.norm2(expected))
        model.patch_embed(images)
        torch.testing.assert_close(block(tokens), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "width", "blocks"), [("deit_tiny_patch16_224", 192, 12), ("fan_base_16_p4_hybrid", 448, 16)]
)
def test_parameter_count(name: str, width: int, blocks: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    plain = sum(p.numel() for p in model.parameters())
    vf.treat_(model, "tap(branches=4)")
    added = sum(p.numel() for p in model.parameters()) - plain
    assert added == blocks * (9 * width * 4 + 2 * 4 + 9 * 4 * 4)


def test_baselines_count_what_the_paper_counts() -> None:
    """Table 1: convolutions in all 16 blocks of FAN-B-Hybrid bring it to 79.4M and 130.7M parameters."""
    with torch.device("meta"):
        model = timm.create_model("fan_base_16_p4_hybrid")
    counts = {}
    for mode in ("average3", "average5", "conv3", "conv5", "kernel"):
        vf.treat_(model, vf.TokenAwarePooling(mode=mode))
        counts[mode] = sum(p.numel() for p in model.parameters()) / 1e6
        vf.untreat_(model)
    assert counts["average3"] == counts["average5"] == pytest.approx(50.475, abs=1e-3)
    assert counts["conv3"] == pytest.approx(79.4, abs=0.05)
    assert counts["conv5"] == pytest.approx(130.7, abs=0.1)
    assert counts["kernel"] == pytest.approx(50.736, abs=1e-3)


def window_sums(image: Tensor, size: int, kernel: Tensor) -> Tensor:
    """Each place's sum over its window of zero-padded neighbours times a kernel (out, in, size, size), tap by tap."""
    radius, (height, width) = size // 2, image.shape[-2:]
    padded = torch.zeros(*image.shape[:2], height + 2 * radius, width + 2 * radius)
    padded[..., radius : radius + height, radius : radius + width] = image
    taps = [
        torch.einsum("oc,bchw->bohw", kernel[:, :, i, j], padded[..., i : i + height, j : j + width])
        for i in range(size)
        for j in range(size)
    ]
    return torch.stack(taps).sum(0)


@pytest.mark.parametrize("mode", ["average3", "average5", "conv3", "conv5", "kernel"])
def test_every_form_equals_a_vit_written_out(mode: str) -> None:
    """The baselines of Table 1 in each block of a rectangular ViT: pooled before attention, not on the shortcut."""
    model, images = build("vit_rect")
    vf.treat_(model, f"tap(mode={mode})")
    with torch.no_grad():
        treated = model(images)
        x = model._pos_embed(model.patch_embed(images))
        for block in model.blocks:
            image = x[:, 1:].transpose(1, 2).reshape(2, -1, 4, 6)
            channels, mean = image.shape[1], torch.eye(image.shape[1])[..., None, None]
            if mode == "kernel":
                weights = block.dilation_predictor.proj(image).softmax(1)
                sizes = [2 * branch + 1 for branch in range(4)]
                boxes = [window_sums(image, s, mean.expand(-1, -1, s, s) / s**2) for s in sizes]
                pooled = sum(weights[:, [branch]] * box for branch, box in enumerate(boxes))
            else:
                size = int(mode[-1])
                learned = block.local_pooling.conv.weight if "conv" in mode else None
                kernel = mean.expand(-1, -1, size, size) / size**2 if learned is None else learned
                assert kernel.shape == (channels, channels, size, size)
                pooled = window_sums(image, size, kernel)
            tokens = torch.cat([x[:, :1], pooled.flatten(2).transpose(1, 2)], 1)
            normed = F.layer_norm(tokens, tokens.shape[-1:], block.norm1.weight, block.norm1.bias, block.norm1.eps)
            x = x + block.attn(normed)
            x = x + block.mlp(block.norm2(x))
        expected = model.forward_head(model.norm(x))
    torch.testing.assert_close(treated, expected, atol=1e-5, rtol=1e-4)


def test_fixed_average_counts_padding() -> None:
    model, images = build("vit_rect")
    vf.treat_(model, "tap(mode=average5)")
    model(images)
    ones = torch.ones(1, 1 + 24, 48)
    out = model.blocks[0].local_pooling(ones)[0, 1:, 0].reshape(4, 6)
    assert out[0, 0] == pytest.approx(9 / 25) and out[2, 2] == pytest.approx(20 / 25)


@pytest.mark.parametrize(
    "spec",
    ["tap(init=near_identity)", "tap(mode=kernel,init=near_identity,branches=7)", "tap(mode=conv5,init=near_identity)"],
)
def test_near_identity_keeps_the_logits(spec: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64).eval()
    model.head.weight.data.normal_(std=0.5)
    images = torch.randn(2, 3, 64, 64) * 3
    with torch.no_grad():
        before = model(images)
        after = vf.treat_(model, spec)(images)
    assert (after - before).abs().max() < 1e-3
    model.train()(images).square().sum().backward()
    last = [p for name, p in model.named_parameters() if ".proj.2." in name or "local_pooling" in name]
    assert last and all(p.grad is not None and p.grad.abs().sum() > 0 for p in last)


def test_near_identity_on_trained_weights(shared: Path) -> None:
    weights = shared / "data/deit_tiny_patch16_224.safetensors"
    if not weights.exists():
        pytest.skip(f"no trained weights at {weights}")
    model = timm.create_model("deit_tiny_patch16_224").eval()
    vf.load_weights(model, weights)
    torch.manual_seed(0)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        before = model(images)
        after = vf.treat_(model, "tap(init=near_identity)")(images)
    assert (after - before).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("layers", "expected"), [("shallow", [0, 1, 2]), ("deep", list(range(3, 10))), ("all", list(range(10)))]
)
def test_layers(layers: str, expected: list[int]) -> None:
    model, _ = build("vit", depth=10)
    vf.treat_(model, vf.TokenAwarePooling(layers=layers))
    assert [i for i, block in enumerate(model.blocks) if hasattr(block, "dilation_predictor")] == expected


@pytest.mark.parametrize("family", ["mixer", "gmlp", "xcit"])
def test_refused_without_token_attention(family: str) -> None:
    model, _ = build(family)
    with pytest.raises(vf.VitfocusError, match="no token attention"):
        vf.treat_(model, "tap")


def test_class_attention_is_left_alone() -> None:
    model, _ = build("cait")
    vf.treat_(model, "tap")
    assert all(hasattr(block, "dilation_predictor") for block in model.blocks)
    assert not any(hasattr(block, "dilation_predictor") for block in model.blocks_token_only)


def test_dropped_tokens_are_refused_in_words() -> None:
    model, images = build("vit", patch_drop_rate=0.5)
    vf.treat_(model, "tap").train()
    with pytest.raises(vf.VitfocusError, match="4×4 patch tokens"):
        model(images)


@pytest.mark.parametrize(
    "bad",
    [
        "tap(branches=0)",
        "tap(branches=2.5)",
        "tap(mode=dilated)",
        "tap(init=near)",
        "tap(mode=average3,init=near_identity)",
    ],
)
def test_bad_options(bad: str) -> None:
    model, _ = build("vit")
    with pytest.raises(vf.VitfocusError):
        vf.treat_(model, bad)
    assert not vf.applied(model)


@pytest.mark.parametrize("name", ["fan_tiny_12_p16_224", "fan_tiny_8_p4_hybrid", "fan_base_16_p4_hybrid"])
def test_published_names_of_full_size_models(shared: Path, name: str) -> None:
    """A released TAP checkpoint fits the treated model name by name and shape by shape."""
    published = json.loads((shared / "golden/models/fan_checkpoint_keys.json").read_text())[f"tap_{name}"]
    with torch.device("meta"):
        model = vf.create_model(f"{name}+tap(branches=4)")
    shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items() if not is_record(key)}
    assert shapes == published


def test_checkpointing_does_not_count_a_batch_twice() -> None:
    """What gradient checkpointing recomputes leaves the running statistics, and so the model in eval mode, alone."""
    model, images = build("vit")
    vf.treat_(model, "tap").train()
    twin = copy.deepcopy(model)
    twin.set_grad_checkpointing()
    for one in (model, twin):
        one(images).square().mean().backward()
    assert int(twin.blocks[0].dilation_predictor.proj[1].num_batches_tracked) == 1
    state = twin.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
