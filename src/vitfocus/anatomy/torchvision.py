"""The families of torchvision: the ViTs (`vit_*`), Swin v1 and v2 (`swin_*`, `swin_v2_*`) and MaxViT (`maxvit_t`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vitfocus.anatomy.block import Anatomy, GridRule, Plan, Trunk, conv_step, pair
from vitfocus.anatomy.registry import Family, register

#: `nn.MultiheadAttention` uses its output projection without calling it and returns a tuple, so attention has no port
#: in the middle, and its end is the input of the dropout after it.
VIT = Plan(
    norm="ln_1",
    attention="self_attention",
    pool="ln_1<",
    attention_places=("ln_1>", None, "dropout<"),
    mlp_places=("mlp<", "mlp.3<", "mlp>"),
    reader="multihead",
)

#: Windows are cut inside the attention module, which also uses its projection without calling it.
SWIN = Plan(
    attention_places=("norm1>", None, "attn>"),
    mlp_places=("mlp<", "mlp.3<", "mlp>"),
    layout="BHWC",
    kind="window",
)

#: The norm follows attention, so the input of attention is pooled.
SWIN_V2 = replace(SWIN, pool="attn<", attention_places=("attn<", None, "norm1<"))

#: A block works on windows, (B, windows, positions, C). These are two axes of tokens, but not those of the image:
#: tokens can be averaged, but not pooled with their neighbours.
MAXVIT = Plan(
    norm="attn_layer.0",
    attention="attn_layer.1",
    mlp="mlp_layer",
    pool=None,
    attention_places=("attn_layer.0>", "attn_layer.1.merge<", "attn_layer.1>"),
    mlp_places=("mlp_layer.0>", "mlp_layer.3<", "mlp_layer>"),
    layout="BHWC",
)


_FIXED_SIZE = ("The model takes images of the size it was built for and no other.",)


def _vision_transformer(model: Any) -> Anatomy:
    rule = GridRule(tuple(conv_step(m) for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d)))
    trunk = Trunk(pair(model.image_size))
    for name, host in model.encoder.layers.named_children():
        trunk.add(host, VIT, f"encoder.layers.{name}", rule, prefix_tokens=1, class_token=True)
    return trunk.anatomy(model, model.conv_proj, takes_tokens=True, notes=_FIXED_SIZE)


def _swin_transformer(model: Any) -> Anatomy:
    stem = model.features[0]
    # The model does not store its image size; these are the sizes of the published weights.
    version_2 = any(type(module).__name__ == "SwinTransformerBlockV2" for module in model.modules())
    plan, trunk = (SWIN_V2, Trunk((256, 256))) if version_2 else (SWIN, Trunk((224, 224)))
    rule, stage = GridRule((conv_step(stem[0]),)), 0
    for outer, part in enumerate(model.features[1:], start=1):
        if not isinstance(part, nn.Sequential):
            rule, stage = rule.then((2,)), stage + 1
            continue
        for inner, host in enumerate(part):
            window = pair(host.attn.window_size)  # type: ignore[union-attr]
            trunk.add(host, plan, f"features.{outer}.{inner}", rule, stage, window=window)
    return trunk.anatomy(model, stem)


def _maxvit(model: Any) -> Anatomy:
    rule = GridRule(tuple(conv_step(m) for m in model.stem.modules() if isinstance(m, nn.Conv2d)))
    rows, columns = model.blocks[0].layers[0].layers.window_attention.grid_size
    trunk = Trunk((4 * rows, 4 * columns))  # the stem halves the image and the first stage halves it again
    for stage, part in enumerate(model.blocks):
        rule = rule.then((3, 2, 1))
        for index, layer in enumerate(part.layers):
            for kind in ("window", "grid"):
                host = layer.layers.get_submodule(f"{kind}_attention")
                name = f"blocks.{stage}.layers.{index}.layers.{kind}_attention"
                window = pair(host.p if kind == "window" else host.g)
                trunk.add(host, replace(MAXVIT, kind=kind), name, rule, stage, window=window)
    return trunk.anatomy(model, model.stem, notes=_FIXED_SIZE)


def build_example(family: Family) -> nn.Module:
    """A small model of the family, untrained: the class `family.example`, called with `family.options`."""
    import torchvision

    return getattr(torchvision.models, family.example)(**family.options)


_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
_SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
_MAXVIT = {"input_size": (64, 64), "stem_channels": 8, "partition_size": 4, "block_channels": [16, 32]} | {
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}


def _register_all() -> None:
    for module, name, dissect, options in (
        ("vision_transformer", "VisionTransformer", _vision_transformer, _VIT),
        ("swin_transformer", "SwinTransformer", _swin_transformer, _SWIN),
        ("maxvit", "MaxVit", _maxvit, _MAXVIT),
    ):
        classes = (f"torchvision.models.{module}.{name}",)
        register(Family(module, "torchvision", classes, dissect, name, options))


_register_all()
