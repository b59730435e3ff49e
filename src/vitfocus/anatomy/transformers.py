"""Hugging Face's families, found by their full class names: transformers is imported by the user, never by us.

Between 4.x and 5.x the library renamed most parts of its blocks, family by family (`attention.attention.query` became
`attention.q_proj`, `output.dense` became `mlp.fc2`), but not the blocks' classes. So a block is found by its class, and
its parts under whichever of the known names is there.

A model's config does not say how its images are normalised. Each record carries the values of the family's published
checkpoints; where an image processor is at hand, its `image_mean` and `image_std` know better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from vitfocus.anatomy.build import Plan, build_block, conv_step, pair
from vitfocus.anatomy.records import Anatomy, Block, GridRule, Size, Step
from vitfocus.anatomy.registry import Family, register
from vitfocus.errors import VitfocusError

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP: dict[str, Any] = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}

#: The same part of a block under its names in the families and versions.
NORM = ("layernorm_before", "norm1", "layer_norm1", "layer_norm_1")
ATTENTION = ("attention.attention", "attention.self", "attention", "self_attn")
PROJECTION = ("attention.output.dense", "attention.o_proj", "attention.proj", "self_attn.out_proj")
FIRST = ("mlp", "intermediate")
LAST = ("mlp.fc2", "mlp.dense2", "mlp.down_proj", "mlp.weights_out", "output.dense")


def _plan(host: nn.Module) -> Plan:
    """The plan of a pre-norm block.

    4.x has no single module for the MLP: `intermediate` is its first half, and `output`, its second, adds the shortcut
    itself. So the MLP ends at the output of its last linear layer; likewise attention, whose module returns a tuple.
    """
    norm, attention, projection, first, last = (_part(host, n) for n in (NORM, ATTENTION, PROJECTION, FIRST, LAST))
    return Plan(
        norm=norm,
        attention=attention,
        mlp=first,
        pool=f"{norm}<",
        attention_places=(f"{norm}>", f"{projection}<", f"{projection}>"),
        mlp_places=(f"{first}<", f"{last}<", f"{last}>"),
    )


def _part(host: nn.Module, names: tuple[str, ...]) -> str:
    """The first of the names that is there."""
    modules = dict(host.named_modules())
    for name in names:
        if name in modules:
            return name
    raise VitfocusError(
        f"{type(host).__name__} has none of {', '.join(names)}: this version of transformers names its parts in a way "
        "that vitfocus does not know."
    )


def _hosts(model: nn.Module, class_name: str) -> Iterator[tuple[str, Any]]:
    """The blocks: modules of that class, with their names."""
    for name, module in model.named_modules():
        if any(cls.__name__ == class_name for cls in type(module).__mro__):
            yield name, module


def _patch_embeddings(model: nn.Module) -> list[nn.Module]:
    """What turns pixels, or the stage before, into tokens: one module a stage."""
    names = ("patch_embeddings", "patch_embedding")
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    return list(found[0]) if isinstance(found[0], nn.ModuleList) else found


def _conv(module: nn.Module) -> nn.Conv2d:
    return next(m for m in module.modules() if isinstance(m, nn.Conv2d))


def _build_size(model: Any, default: int = 224) -> Size:
    size = getattr(model.config, "image_size", None) or default
    return pair((size["height"], size["width"]) if isinstance(size, dict) else size)


def _columnar(
    model: Any, family: str, layer: str, *, prefix_tokens: int, class_token: bool = True, **normal: Any
) -> Anatomy:
    """Families with one list of equal blocks: ViT, DeiT, BEiT, DINO, the towers of CLIP and SigLIP."""
    stem, size = _patch_embeddings(model)[0], _build_size(model)
    rule = GridRule((conv_step(_conv(stem)),))
    blocks = [
        build_block(
            host,
            _plan(host),
            name=name,
            depth=depth,
            stage=0,
            grid_rule=rule,
            build_size=size,
            prefix_tokens=prefix_tokens,
            class_token=class_token,
        )
        for depth, (name, host) in enumerate(_hosts(model, layer))
    ]
    return Anatomy(family, model, stem, tuple(blocks), size, **normal)


def _vit(model: Any) -> Anatomy:
    return _columnar(model, "vit", "ViTLayer", prefix_tokens=1, **HALF)


def _deit(model: Any) -> Anatomy:
    # The class token and the distillation token, whether or not a head reads the latter.
    return _columnar(model, "deit", "DeiTLayer", prefix_tokens=2, **IMAGENET)


def _beit(model: Any) -> Anatomy:
    return _columnar(model, "beit", "BeitLayer", prefix_tokens=1, **HALF)


def _data2vec_vision(model: Any) -> Anatomy:
    return _columnar(model, "data2vec_vision", "Data2VecVisionLayer", prefix_tokens=1, **HALF)


def _dinov2(model: Any) -> Anatomy:
    return _columnar(model, "dinov2", "Dinov2Layer", prefix_tokens=1, **IMAGENET)


def _dinov2_with_registers(model: Any) -> Anatomy:
    prefix = 1 + model.config.num_register_tokens
    return _columnar(model, "dinov2_with_registers", "Dinov2WithRegistersLayer", prefix_tokens=prefix, **IMAGENET)


def _dinov3_vit(model: Any) -> Anatomy:
    prefix = 1 + model.config.num_register_tokens
    return _columnar(model, "dinov3_vit", "DINOv3ViTLayer", prefix_tokens=prefix, **IMAGENET)


def _clip(model: Any) -> Anatomy:
    return _columnar(model, "clip", "CLIPEncoderLayer", prefix_tokens=1, **CLIP)


def _siglip(model: Any) -> Anatomy:
    return _columnar(model, "siglip", "SiglipEncoderLayer", prefix_tokens=0, class_token=False, **HALF)


def _stage(name: str) -> int:
    """The stage of a pyramid's block: the first number in its name ("encoder.block.2.0", "stages.2.blocks.0")."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _swin(model: Any) -> Anatomy:
    return _windowed(model, "swin", "SwinLayer")


def _swinv2(model: Any) -> Anatomy:
    return _windowed(model, "swinv2", "Swinv2Layer")


def _windowed(model: Any, family: str, layer: str) -> Anatomy:
    """Swin, whose attention module sees windows, so that what touches all tokens sits around it.

    Version 1 has its norm before the windows are cut and `drop_path` behind. In version 2 the norm follows attention,
    and no module stands before the cut: the method that pads the grid for it does, where the grid has two axes.
    """
    stem, size = _patch_embeddings(model)[0], _build_size(model)
    patches = GridRule(((conv_step(_conv(stem))[1],),))
    blocks: list[Block] = []
    for name, host in _hosts(model, layer):
        plan, stage = dataclasses.replace(_plan(host), kind="window"), _stage(name)
        if family == "swin":
            plan = dataclasses.replace(plan, attention_places=(f"{plan.norm}>", None, "drop_path<"))
            window = model.config.window_size
        else:
            cut = "maybe_pad() BHWC"
            plan = dataclasses.replace(plan, pool=cut, attention_places=(cut, None, f"{plan.norm}<"))
            window = host.attention.self.window_size
        blocks.append(
            build_block(
                host,
                plan,
                name=name,
                depth=len(blocks),
                stage=stage,
                grid_rule=patches.then(*((2,),) * stage),
                build_size=size,
                window=pair(window),
            )
        )
    return Anatomy(family, model, stem, tuple(blocks), size, **IMAGENET)


def _pvt(model: Any) -> Anatomy:
    return _pyramid(model, "pvt", "PvtLayer")


def _pvt_v2(model: Any) -> Anatomy:
    return _pyramid(model, "pvt_v2", "PvtV2BlockLayer")


def _segformer(model: Any) -> Anatomy:
    return _pyramid(model, "segformer", "SegformerLayer", default_size=512)


def _pyramid(model: Any, family: str, layer: str, default_size: int = 224) -> Anatomy:
    """PVT and its descendants: a convolution a stage, and attention to keys that another one has reduced."""
    embeddings, size = _patch_embeddings(model), _build_size(model, default_size)
    steps = tuple(conv_step(_conv(embedding)) for embedding in embeddings)
    blocks: list[Block] = []
    for name, host in _hosts(model, layer):
        stage, plan = _stage(name), _plan(host)
        rule = GridRule(steps[: stage + 1])
        reductions = _reductions(host.get_submodule(plan.attention or ""))
        # PVT's last stage has a class token, the others have none.
        class_token = getattr(embeddings[stage], "cls_token", None) is not None
        blocks.append(
            build_block(
                host,
                dataclasses.replace(plan, kind="reduced" if reductions else "global"),
                name=name,
                depth=len(blocks),
                stage=stage,
                grid_rule=rule,
                key_rule=rule.then(*reductions),
                build_size=size,
                prefix_tokens=int(class_token),
                class_token=class_token,
            )
        )
    return Anatomy(family, model, embeddings[0], tuple(blocks), size, **IMAGENET)


def _reductions(attention: nn.Module) -> tuple[Step, ...]:
    """The grid steps from queries to keys: a pooling to a fixed size (PVTv2 linear), a strided convolution."""
    return tuple(
        conv_step(module) if isinstance(module, nn.Conv2d) else pair(module.output_size)
        for module in attention.modules()
        if isinstance(module, nn.Conv2d | nn.AdaptiveAvgPool2d)
    )


def _vilt(model: Any) -> Anatomy:
    stem, size = _patch_embeddings(model)[0], _build_size(model, 384)
    blocks = [
        build_block(
            host,
            dataclasses.replace(_plan(host), pool=None),
            name=name,
            depth=depth,
            stage=0,
            grid_rule=GridRule((conv_step(_conv(stem)),)),
            build_size=size,
            prefix_tokens=1,
            class_token=True,
        )
        for depth, (name, host) in enumerate(_hosts(model, "ViltLayer"))
    ]
    notes = (
        "The sequence is the text's tokens, then the image's: its class token (the one prefix token) and its patches.",
        "The class token that the heads read is the text's, the first of the sequence.",
        "Patches come in random order, padded to the longest of the batch; only while read do they lie on a grid.",
    )
    encoder, text = model.encoder, model.embeddings.text_embeddings
    return Anatomy("vilt", model, stem, tuple(blocks), size, **HALF, encoder=encoder, text=text, notes=notes)


def build_example(family: Family) -> nn.Module:
    """A small model of the family, untrained: the class `family.example` with a config of `family.options`."""
    import transformers

    cls = getattr(transformers, family.example)
    return cls(cls.config_class(**family.options))


_SMALL = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VIT = _SMALL | {"patch_size": 8, "intermediate_size": 64}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_PYRAMID = {"num_encoder_blocks": 4, "depths": [1, 2, 1, 1], "hidden_sizes": [16, 24, 32, 32]} | {
    "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [2, 2, 2, 2],
}


def _register_all() -> None:
    for family, module, classes, dissect, options in (
        ("vit", "vit.modeling_vit", ("ViTModel",), _vit, _VIT),
        ("deit", "deit.modeling_deit", ("DeiTModel",), _deit, _VIT),
        (
            "beit",
            "beit.modeling_beit",
            ("BeitModel", "BeitBackbone"),
            _beit,
            _VIT | {"use_relative_position_bias": True},
        ),
        ("data2vec_vision", "data2vec.modeling_data2vec_vision", ("Data2VecVisionModel",), _data2vec_vision, _VIT),
        ("dinov2", "dinov2.modeling_dinov2", ("Dinov2Model", "Dinov2Backbone"), _dinov2, _SMALL | {"patch_size": 8}),
        (
            "dinov2_with_registers",
            "dinov2_with_registers.modeling_dinov2_with_registers",
            ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
            _dinov2_with_registers,
            _SMALL | {"patch_size": 8},
        ),
        ("dinov3_vit", "dinov3_vit.modeling_dinov3_vit", ("DINOv3ViTModel", "DINOv3ViTBackbone"), _dinov3_vit, _VIT),
        ("swin", "swin.modeling_swin", ("SwinModel", "SwinBackbone"), _swin, _SWIN),
        ("swinv2", "swinv2.modeling_swinv2", ("Swinv2Model", "Swinv2Backbone"), _swinv2, _SWIN),
        ("pvt", "pvt.modeling_pvt", ("PvtModel",), _pvt, _PYRAMID | {"image_size": 64}),
        ("pvt_v2", "pvt_v2.modeling_pvt_v2", ("PvtV2Model",), _pvt_v2, _PYRAMID | {"image_size": 64}),
        ("segformer", "segformer.modeling_segformer", ("SegformerModel",), _segformer, _PYRAMID),
        ("clip", "clip.modeling_clip", ("CLIPVisionModel", "CLIPVisionTransformer"), _clip, _VIT),
        ("siglip", "siglip.modeling_siglip", ("SiglipVisionModel", "SiglipVisionTransformer"), _siglip, _VIT),
        ("vilt", "vilt.modeling_vilt", ("ViltModel",), _vilt, _VIT | {"vocab_size": 50}),
    ):
        names = tuple(f"transformers.models.{module}.{name}" for name in classes)
        register(Family(family, "transformers", names, dissect, classes[0], options))


_register_all()
