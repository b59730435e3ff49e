"""One suite over FAN, RVT, PVT and LocalViT: published outputs and counts, timm's conventions, compile, export."""

from __future__ import annotations

import copy
import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitfocus.core.errors import VitfocusError
from vitfocus.models import FAN, PVT, RVT, LocalViT, load_published
from vitfocus.models.base import Backbone, resize_pair_map

FAN_SIZES: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2}
STEM: dict[str, Any] = {"stem_depths": (1, 2), "stem_dims": (8, 16)}
RVT_SIZES: dict[str, Any] = {"base_dims": (8, 8), "depths": (2, 1), "heads": (2, 4)}
PVT_SIZES: dict[str, Any] = {
    "embed_dims": (8, 16, 24),
    "num_heads": (1, 2, 3),
    "mlp_ratios": (2, 2, 2),
    "depths": (1, 2, 1),
    "sr_ratios": (4, 2, 1),
}
LOCAL_SIZES: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "se_reduction": 8}

# class, arguments, a registered name, and the parameters whose gradient is zero by the published design:
# a bias that a softmax over tokens (FAN's q) or over keys (class attention's k) or a BatchNorm behind it (RVT: the
# convolutions' own, and norm2's through the first of them) cancels, and what lies behind LocalViT's last attention,
# which its class token never sees.
CASES: dict[str, tuple[type[Backbone], dict[str, Any], str, str]] = {
    "fan": (FAN, FAN_SIZES, "fan_tiny_12_p16_224", r"blocks\.\d+\.mlp\.q\.bias|cls_attn_blocks\.\d+\.attn\.k\.bias"),
    "fan_hybrid": (
        FAN,
        FAN_SIZES | STEM,
        "fan_tiny_8_p4_hybrid",
        r"blocks\.\d+\.mlp\.q\.bias|cls_attn_blocks\.\d+\.attn\.k\.bias",
    ),
    "rvt": (RVT, RVT_SIZES, "rvt_tiny", r"patch_embed\.proj\.0\.bias|.*\.mlp\.(fc1|dwconv|fc2)\.bias|.*\.norm2\.bias"),
    "rvt_plus": (
        RVT,
        RVT_SIZES | {"masked_blocks": 1},
        "rvt_tiny_plus",
        r"patch_embed\.proj\.0\.bias|.*\.mlp\.(fc1|dwconv|fc2)\.bias|.*\.norm2\.bias",
    ),
    "rvt_plain_mlp": (RVT, RVT_SIZES | {"conv_mlp": False}, "rvt_tiny", r"patch_embed\.proj\.0\.bias"),
    "pvt": (PVT, PVT_SIZES, "pvt_tiny", r"$^"),
    "localvit": (LocalViT, LOCAL_SIZES, "localvit_tiny", r"blocks\.1\.conv\..*"),
}
each = pytest.mark.parametrize("case", CASES)
traced = pytest.mark.parametrize("case", [case for case in CASES if case != "rvt"])  # which rvt_plus contains

PARAMETERS = {
    "fan_tiny_12_p16_224": 7.320,
    "fan_small_12_p16_224": 28.345,
    "fan_base_18_p16_224": 54.350,
    "fan_large_24_p16_224": 80.574,
    "fan_tiny_8_p4_hybrid": 7.467,
    "fan_small_12_p4_hybrid": 26.118,
    "fan_base_16_p4_hybrid": 50.475,
    "fan_large_16_p4_hybrid": 76.855,
    "rvt_tiny": 8.646,
    "rvt_tiny_plus": 10.951,
    "rvt_small": 22.148,
    "rvt_small_plus": 23.301,
    "rvt_base": 86.224,
    "rvt_base_plus": 88.529,
    "pvt_tiny": 13.229,
    "pvt_small": 24.486,
    "pvt_medium": 44.208,  # the authors state 44.2
    "pvt_large": 61.369,  # the authors state 61.4
    "localvit_tiny": 5.909,
    "localvit_tiny_mlp4_act3_r192": 5.909,
    "localvit_tiny_mlp4_act3_r4": 9.376,
    "localvit_tiny_mlp6_act1": 7.655,
    "localvit_small": 22.433,  # the authors state 22.4
    "localvit_small_mlp4_act3_r384": 22.433,
}


def build(case: str, img_size: int | tuple[int, int] = 32, **kwargs: Any) -> Backbone:
    """A tiny model, every parameter and running statistic random, so that nothing hides behind a zero or a one."""
    cls, sizes, _, _ = CASES[case]
    torch.manual_seed(0)
    model = cls(img_size=img_size, num_classes=5, **(sizes | kwargs))
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if name.endswith("running_var") else 0.2 * torch.randn_like(value))
            if "norm" in name and name.endswith("weight"):
                value.add_(1)
    return model.eval()


def images(height: int = 32, width: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def golden(path: Path) -> tuple[Backbone, dict[str, Tensor], Tensor, Tensor]:
    """The model that a golden file describes, its published state, an input and the published logits."""
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = {name.removeprefix("state."): value for name, value in tensors.items() if name.startswith("state.")}
    model: Backbone
    if "fan" in path.stem:
        config["stem_depths"], config["stem_dims"] = (
            config.pop("convnext_depths", None),
            config.pop("convnext_dims", None),
        )
        config.pop("tap_branches", None)
        model = FAN(**config)
    elif "rvt" in path.stem:
        keys = {"img_size": "image_size", "depths": "depth"} | {k: k for k in ("base_dims", "heads", "num_classes")}
        model = RVT(
            **{ours: config[theirs] for ours, theirs in keys.items()}, masked_blocks=config["masked_block"] or 0
        )
    elif "pvt" in path.stem:
        model = PVT(**config)
    else:
        config.pop("activation")
        model = LocalViT(**config)
    return model.eval(), state, tensors["input"], tensors["logits"]


@functools.cache
def meta(name: str, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


class Pooling(nn.Module):
    """Token-aware average pooling, straight from FACTS: a stand-in for the treatment, in the published names."""

    def __init__(self, dim: int, scales: int = 4) -> None:
        super().__init__()
        first, second = (nn.Conv2d(d, scales, 3, padding=1, bias=False) for d in (dim, scales))
        self.proj = nn.Sequential(first, nn.BatchNorm2d(scales), second)

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        image = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        weights = self.proj(image).softmax(dim=1)
        box = torch.full((image.shape[1], 1, 3, 3), 1 / 9)
        pooled = [image] + [
            nn.functional.conv2d(image, box, padding=k, dilation=k, groups=image.shape[1]) for k in range(1, 4)
        ]
        return sum(weights[:, k : k + 1] * pooled[k] for k in range(4)).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("name", ["fan_vit", "fan_hybrid", "rvt", "rvt_plus", "pvt", "localvit"])
def test_logits_equal_the_published_ones(name: str, shared: Path) -> None:
    model, state, x, logits = golden(shared / "golden" / "models" / f"{name}.safetensors")
    report = load_published(model, state)
    assert report == (list(state), [], [])
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["tap_fan_vit", "tap_fan_hybrid"])
def test_published_pooling_loads_where_the_treatment_is_and_is_reported_where_not(name: str, shared: Path) -> None:
    model, state, x, logits = golden(shared / "golden" / "models" / f"{name}.safetensors")
    report = load_published(model, state)
    assert report.missing == []
    assert report.unexpected == [key for key in state if ".dilation_predictor." in key]
    for block in model.blocks:
        block.dilation_predictor = Pooling(model.embed_dim)
        block.norm1.register_forward_pre_hook(lambda _, args, pool=block.dilation_predictor: (pool(args[0]),))
    model.eval()
    assert (
        load_published(model, {"state_dict": {f"module.{key}": value for key, value in state.items()}}).unexpected == []
    )
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, rtol=0, atol=1e-5)


def test_published_full_size_names_and_shapes_fit(shared: Path) -> None:
    for family in ("fan", "rvt"):
        published = json.loads((shared / "golden" / "models" / f"{family}_checkpoint_keys.json").read_text())
        for name, shapes in published.items():
            state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
            report = load_published(meta(name.removeprefix("tap_")), state)
            assert report.missing == [], name
            assert report.unexpected == [key for key in shapes if ".dilation_predictor." in key], name
            assert bool(report.unexpected) == name.startswith("tap_")


def test_every_registered_name_is_counted_here() -> None:
    assert sorted(timm.list_models(module=["fan", "rvt", "pvt", "localvit"])) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_and_configuration(name: str) -> None:
    model, cfg = meta(name), timm.get_pretrained_cfg(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 3) == PARAMETERS[name]
    assert not cfg.has_weights
    assert model.get_submodule(cfg.first_conv).in_channels == 3
    assert model.get_submodule(cfg.classifier).out_features == cfg.num_classes


def test_published_variants_of_rvt_base() -> None:
    """91.8 M in the papers is 12 masked blocks; TAP & ADL's release uses the convolutional MLP everywhere."""
    counts = [{"masked_blocks": 12}, {"conv_mlp": True}]
    totals = [sum(p.numel() for p in meta("rvt_base_plus", **kwargs).parameters()) for kwargs in counts]
    assert [round(total / 1e6, 3) for total in totals] == [91.756, 89.063]
    assert round((totals[1] + 12 * 27_800) / 1e6, 3) == 89.397


@each
def test_other_sizes_and_rectangles(case: str) -> None:
    """A model fed another size equals one built for that size whose positions were resampled at loading."""
    model, size = build(case), (48, 80)
    rebuilt = build(case, img_size=size)
    report = load_published(rebuilt, model.state_dict())
    assert not report.missing and not report.unexpected
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model(images(*size))
        assert out.shape == (2, 5) and out.isfinite().all()
        torch.testing.assert_close(out, rebuilt(images(*size)), rtol=1e-4, atol=1e-5)
        assert model(images(45, 71)).shape == (2, 5)


@each
@pytest.mark.parametrize("size", [(32, 32), (45, 71), (64, 48)])
def test_the_token_grid_follows_from_the_image_size(case: str, size: tuple[int, int]) -> None:
    model = build(case)
    told = getattr(model, "patch_embed1" if case == "pvt" else "patch_embed").dynamic_feat_size(size)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = model.forward_intermediates(images(*size), intermediates_only=True, norm=False)
    stem = len(STEM["stem_dims"]) if case == "fan_hybrid" else 0
    assert tuple(first[stem].shape[2:]) == told


def test_position_masks_warn_once_at_another_size() -> None:
    model = build("rvt_plus")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images())
        with pytest.warns(UserWarning, match="2×2 tokens and are interpolated to 3×4"):
            model(images(48, 64))
        model(images(48, 64))


def test_pair_map_resizes_queries_and_keys_in_the_same_way() -> None:
    """The map of a product over queries and keys is the product of their resized maps."""
    query, key = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    resized = resize_pair_map(query.flatten(1)[:, :, None] * key.flatten(1)[:, None], (3, 4), (5, 2))
    alone = [nn.functional.interpolate(t[None], size=(5, 2), mode="bilinear")[0].flatten(1) for t in (query, key)]
    torch.testing.assert_close(resized, alone[0][:, :, None] * alone[1][:, None])


@each
def test_gradients_reach_every_parameter_that_the_design_lets_them(case: str) -> None:
    model = build(case).double().train()
    model(images(batch=4).double()).square().sum().backward()
    largest = {name: p.grad.abs().max().item() for name, p in model.named_parameters() if p.grad is not None}
    assert list(largest) == [name for name, _ in model.named_parameters()]
    dead = {name for name, value in largest.items() if value < 1e-10}
    assert dead == {name for name in largest if re.fullmatch(CASES[case][3], name)}


@each
def test_gradient_checkpointing_changes_nothing(case: str) -> None:
    gradients = []
    for enable in (False, True):
        model = build(case).double().train()
        model.set_grad_checkpointing(enable)
        model(images(batch=4).double()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@each
def test_head_and_classifier(case: str) -> None:
    model = build(case)
    with torch.no_grad():
        features = model.forward_features(images())
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
        torch.testing.assert_close(model.forward_head(features), model(images()))
        model.reset_classifier(7)
        assert model.get_classifier().out_features == 7 and model(images()).shape == (2, 7)
        model.reset_classifier(3, "avg")
        assert model(images()).shape == (2, 3)
        model.reset_classifier(0)
        assert model(images()).shape == (2, model.num_features)
    with pytest.raises(VitfocusError, match="global_pool"):
        model.reset_classifier(3, "max")


@each
def test_intermediates_agree_with_the_modules_they_name(case: str) -> None:
    model = build(case)
    seen: dict[str, Tensor] = {}
    for info in model.feature_info:
        module = model.get_submodule(info["module"])
        last = module[-1] if isinstance(module, nn.ModuleList) else module
        last.register_forward_hook(lambda _, args, out, key=info["module"]: seen.__setitem__(key, out))
    with torch.no_grad():
        final, maps = model.forward_intermediates(images())
        torch.testing.assert_close(model.forward_head(final), model(images()))
        tokens = model.forward_intermediates(images(), indices=1, output_fmt="NLC", intermediates_only=True)
        early = model.forward_intermediates(images(), indices=[0], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early[0], maps[0])
    torch.testing.assert_close(tokens[0], maps[-1].flatten(2).transpose(1, 2))
    assert len(maps) == len(model.feature_info)
    for info, feature in zip(model.feature_info, maps, strict=True):
        assert feature.shape == (2, info["num_chs"], 32 // info["reduction"], 32 // info["reduction"])
        out = seen[info["module"]]
        flat = (
            out if out.ndim == 4 else out[:, -feature[0, 0].numel() :].transpose(1, 2).unflatten(2, feature.shape[2:])
        )
        torch.testing.assert_close(feature, flat)


@each
def test_features_only(case: str) -> None:
    expected = {
        "fan": [16, 16, 16],
        "fan_hybrid": [4, 8, 16],
        "rvt": [16, 32],
        "rvt_plus": [16, 32],
        "rvt_plain_mlp": [16, 32],
        "pvt": [4, 8, 16],
        "localvit": [16, 16, 16],
    }
    _, sizes, name, _ = CASES[case]
    deeper = sizes | ({"depth": 3} if "depth" in sizes else {})
    model = timm.create_model(name, features_only=True, img_size=64, **deeper).train()
    assert model.feature_info.reduction() == expected[case]
    features = model(images(64, 64))
    assert [(f.shape[1], 64 // f.shape[2]) for f in features] == list(
        zip(model.feature_info.channels(), expected[case], strict=True)
    )
    sum(f.square().mean() for f in features).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    first = timm.create_model(name, features_only=True, img_size=64, out_indices=[0], **deeper)
    assert len(first(images(64, 64))) == 1
    assert sum(p.numel() for p in first.parameters()) < sum(p.numel() for p in model.parameters())


@each
def test_conventions_for_optimisers(case: str) -> None:
    from timm.models import group_parameters

    model = build(case)
    names = dict(model.named_parameters())
    assert model.no_weight_decay() <= set(names)
    if case.startswith("fan"):
        assert "blocks.0.mlp.temperature" in model.no_weight_decay()
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert sorted(name for group in groups.values() for name in group) == sorted(names)
        assert all(name.startswith("head") for name in groups[max(groups)])
        assert any(name.startswith("patch_embed") for name in groups[0])


@traced
def test_compiles_without_a_graph_break(case: str) -> None:
    model = build(case)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@traced
def test_exports_with_a_free_batch(case: str) -> None:
    model = build(case)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images(batch=3)), model(images(batch=3)), rtol=1e-4, atol=1e-5)


@each
def test_attention_is_fused_where_the_arithmetic_allows(case: str) -> None:
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is torch.nn.functional.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    model = build(case)
    layers = [module for name, module in model.named_modules() if name.endswith("attn")]
    masked = [module for module in layers if getattr(module, "mask_grid", None)]
    with torch.no_grad(), Count() as count:
        model(images())
    assert count.calls == len(layers) - len(masked) and len(masked) == (case == "rvt_plus")


@each
def test_low_precision_and_drop_rates(case: str) -> None:
    model = build(case, drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.2, pos_drop_rate=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.train()(images(batch=4))
    assert out.isfinite().all()
    rates = [m.drop_prob for n, m in model.named_modules() if n.endswith("drop_path1") and hasattr(m, "drop_prob")]
    assert rates == [0.2, 0.2] if case.startswith("fan") else rates == sorted(rates) and rates[-1] == pytest.approx(0.2)


@each
def test_load_published_is_all_or_nothing(case: str) -> None:
    model = build(case)
    before = copy.deepcopy(model.state_dict())
    other = {name: torch.zeros_like(value) for name, value in before.items()}
    other["head.weight"] = torch.zeros(9, model.num_features)
    with pytest.raises(VitfocusError, match=r"head\.weight has shape \(9, \d+\) in the checkpoint but \(5, \d+\)"):
        load_published(model, other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    del other["head.weight"]
    report = load_published(model, {"epoch": 3, "model": other | {"extra.bias": torch.zeros(1)}})
    assert report.missing == ["head.weight"] and report.unexpected == ["extra.bias"]
    assert sorted(report.loaded) == sorted(other)
    assert not model.get_classifier().bias.any()


@pytest.mark.parametrize("nest", [(), ("model",), ("state_dict",), ("state_dict_ema",), ("model", "state_dict")])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_load_published_unwraps(nest: tuple[str, ...], prefix: str) -> None:
    model = build("fan")
    checkpoint: dict[str, Any] = {prefix + name: torch.ones_like(v) for name, v in model.state_dict().items()}
    for key in reversed(nest):
        checkpoint = {"epoch": 1, key: checkpoint, "optimizer": {}}
    assert load_published(model, checkpoint)[1:] == ([], [])
    assert all((value == 1).all() for value in model.state_dict().values())


def test_errors_say_what_to_fix() -> None:
    with pytest.raises(VitfocusError, match="mapping from names to tensors"):
        load_published(build("fan"), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(VitfocusError, match="does not divide into 3 heads"):
        FAN(32, embed_dim=16, num_heads=3)
    with pytest.raises(VitfocusError, match="power of two"):
        FAN(32, patch_size=12)
    with pytest.raises(VitfocusError, match="both stem_depths and stem_dims"):
        FAN(32, stem_depths=(1, 1))
    with pytest.raises(VitfocusError, match="multiple of its stride 8"):
        FAN(32, patch_size=4, stem_depths=(1, 1), stem_dims=(8, 16))
    with pytest.raises(VitfocusError, match="per stage"):
        RVT(32, base_dims=(8,), depths=(1, 1), heads=(1,))
    with pytest.raises(VitfocusError, match="multiple of it"):
        RVT(32, base_dims=(8, 8), depths=(1, 1), heads=(2, 3))
    with pytest.raises(VitfocusError, match="masked_blocks"):
        RVT(32, base_dims=(8,), depths=(1,), heads=(1,), masked_blocks=2)
    with pytest.raises(VitfocusError, match="sr_ratio must be 1"):
        PVT(32, **(PVT_SIZES | {"sr_ratios": (4, 2, 2)}))
    with pytest.raises(VitfocusError, match="se_reduction"):
        LocalViT(32, **(LOCAL_SIZES | {"se_reduction": 999}))
