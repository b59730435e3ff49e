"""torchvision's families: the ViTs (`vit_*`) and both versions of Swin (`swin_*`, `swin_v2_*`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitfocus.anatomy.build import Plan, build_block, conv_step, pair
from vitfocus.anatomy.records import Anatomy, Block, GridRule
from vitfocus.anatomy.registry import Family, register

#: `nn.MultiheadAttention` uses its output projection without calling it and returns a tuple, so attention has no middle
#: to reach, and ends where the dropout behind it begins.
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

#: The norm follows attention, so attention's own input is pooled.
SWIN_V2 = Plan(
    pool="attn<",
    attention_places=("attn<", None, "norm1<"),
    mlp_places=("mlp<", "mlp.3<", "mlp>"),
    layout="BHWC",
    kind="window",
)


def _vision_transformer(model: Any) -> Anatomy:
    rule = GridRule(tuple(conv_step(m) for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d)))
    size = pair(model.image_size)
    blocks = [
        build_block(
            host,
            VIT,
            name=f"encoder.layers.{name}",
            depth=depth,
            stage=0,
            grid_rule=rule,
            build_size=size,
            prefix_tokens=1,
            class_token=True,
        )
        for depth, (name, host) in enumerate(model.encoder.layers.named_children())
    ]
    notes = ("The model takes images of the size it was built for and no other.",)
    return Anatomy("vision_transformer", model, model.conv_proj, tuple(blocks), size, notes=notes)


def _swin_transformer(model: Any) -> Anatomy:
    stem = model.features[0]
    # The model keeps no size; these are the published weights' own.
    version_2 = any(type(module).__name__ == "SwinTransformerBlockV2" for module in model.modules())
    size = (256, 256) if version_2 else (224, 224)
    rule, stage, blocks = GridRule((conv_step(stem[0]),)), 0, list[Block]()
    for outer, part in enumerate(model.features[1:], start=1):
        if not isinstance(part, nn.Sequential):
            rule, stage = rule.then((2,)), stage + 1
            continue
        hosts: list[Any] = list(part)
        for inner, host in enumerate(hosts):
            blocks.append(
                build_block(
                    host,
                    SWIN_V2 if version_2 else SWIN,
                    name=f"features.{outer}.{inner}",
                    depth=len(blocks),
                    stage=stage,
                    grid_rule=rule,
                    build_size=size,
                    window=pair(host.attn.window_size),
                )
            )
    return Anatomy("swin_transformer", model, stem, tuple(blocks), size)


def build_example(family: Family) -> nn.Module:
    """A small model of the family, untrained: the class `family.example`, called with `family.options`."""
    import torchvision

    return getattr(torchvision.models, family.example)(**family.options)


_VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
_SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}


def _register_all() -> None:
    for module, name, dissect, options in (
        ("vision_transformer", "VisionTransformer", _vision_transformer, _VIT),
        ("swin_transformer", "SwinTransformer", _swin_transformer, _SWIN),
    ):
        classes = (f"torchvision.models.{module}.{name}",)
        register(Family(module, "torchvision", classes, dissect, name, options))


_register_all()
