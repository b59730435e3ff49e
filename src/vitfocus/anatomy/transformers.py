"""Hugging Face's families, found by their full class names: transformers is imported by the user, never by us.

Between 4.x and 5.x the library renamed most parts of its blocks, family by family (`attention.attention.query` became
`attention.q_proj`, `output.dense` became `mlp.fc2`), but not the blocks' classes. So a block is found by its class, and
its parts under whichever of the known names is there.

A model's config does not say how its images are normalised. Each record carries the values of the family's published
checkpoints; where an image processor is at hand, its `image_mean` and `image_std` know better.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from vitfocus.anatomy.block import Anatomy, Block, GridRule, Plan, Size, Step, build_block, conv_step, pair
from vitfocus.anatomy.registry import Family, register
from vitfocus.core.errors import VitfocusError

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
CLIP: dict[str, Any] = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}

#: The same part of a block under its names in the families and versions.
NORM = ("layernorm_before", "norm1", "layer_norm1", "layer_norm_1", "rms_norm1")
ATTENTION = ("attention.attention", "attention.self", "attention", "self_attn")
PROJECTION = (
    "attention.output.dense",
    "attention.o_proj",
    "attention.proj",
    "attention.out_proj",
    "self_attn.out_proj",
    "self_attn.projection",
)
FIRST = ("mlp", "ffn", "intermediate")
LAST = ("mlp.fc2", "mlp.dense2", "mlp.down_proj", "mlp.weights_out", "ffn.down_proj", "output.dense")

#: What is put before the patches: parameters of the module that holds the patch embedding.
CLASS_TOKEN = ("cls_token", "class_embedding")
PREFIX = (*CLASS_TOKEN, "distillation_token", "register_tokens")


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
    found = [module for _, module in _named_embeddings(model)]
    return list(found[0]) if isinstance(found[0], nn.ModuleList) else found


def _named_embeddings(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = ("patch_embeddings", "patch_embedding", "patch_embed")
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    if not found:
        raise VitfocusError(f"{type(model).__name__} has no {' or '.join(names)}: how it cuts patches is not known.")
    return found


def _prefix(model: nn.Module) -> dict[str, Any]:
    """How many tokens stand before the patches, and whether the class token is the first of them."""
    holder = model.get_submodule(_named_embeddings(model)[0][0].rpartition(".")[0])
    tokens = {name: token for name in PREFIX if isinstance(token := getattr(holder, name, None), nn.Parameter)}
    counts = {name: 1 if token.ndim == 1 else int(token.shape[-2]) for name, token in tokens.items()}
    class_token, registers = any(name in tokens for name in CLASS_TOKEN), counts.get("register_tokens", 0)
    return {"prefix_tokens": sum(counts.values()), "class_token": class_token, "registers": registers}


def _conv(module: nn.Module) -> nn.Conv2d:
    return next(m for m in module.modules() if isinstance(m, nn.Conv2d))


def _build_size(model: Any, default: int = 224) -> Size:
    size = getattr(model.config, "image_size", None) or default
    return pair((size["height"], size["width"]) if isinstance(size, dict) else size)


def _columnar(model: Any, family: str, layer: str, **normal: Any) -> Anatomy:
    """Families with one list of equal blocks: ViT, DeiT, BEiT, DINO, the towers of CLIP and its like."""
    stem, size = _patch_embeddings(model)[0], _build_size(model)
    rule, tokens = GridRule((conv_step(_conv(stem)),)), _prefix(model)
    blocks = [
        build_block(host, _plan(host), name=name, depth=depth, stage=0, grid_rule=rule, build_size=size, **tokens)
        for depth, (name, host) in enumerate(_hosts(model, layer))
    ]
    grows = not any("relative_position" in name for name, _ in model.named_modules())
    return Anatomy(family, model, stem, tuple(blocks), size, **normal, takes_tokens=grows)


def _stage(name: str) -> int:
    """The stage of a pyramid's block: the first number in its name ("encoder.block.2.0", "stages.2.blocks.0")."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _windowed(model: Any, family: str, layer: str, **normal: Any) -> Anatomy:
    """Swin, whose attention module sees windows, so that what touches all tokens sits around it.

    Version 1 has its norm before the windows are cut and `drop_path` behind. In version 2 the norm follows attention,
    and no module stands before the cut: the method that pads the grid for it does, where the grid has two axes.
    """
    stem, size = _patch_embeddings(model)[0], _build_size(model)
    patches = GridRule(((conv_step(_conv(stem))[1],),))
    blocks: list[Block] = []
    for name, host in _hosts(model, layer):
        plan, stage = dataclasses.replace(_plan(host), kind="window"), _stage(name)
        if layer != "Swinv2Layer":
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
    return Anatomy(family, model, stem, tuple(blocks), size, **normal)


def _pyramid(model: Any, family: str, layer: str, default_size: int = 224, **normal: Any) -> Anatomy:
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
    return Anatomy(family, model, embeddings[0], tuple(blocks), size, **normal)


def _reductions(attention: nn.Module) -> tuple[Step, ...]:
    """The grid steps from queries to keys: a pooling to a fixed size (PVTv2 linear), a strided convolution."""
    return tuple(
        conv_step(module) if isinstance(module, nn.Conv2d) else pair(module.output_size)
        for module in attention.modules()
        if isinstance(module, nn.Conv2d | nn.AdaptiveAvgPool2d)
    )


def _vilt(model: Any, family: str, layer: str, **normal: Any) -> Anatomy:
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
        for depth, (name, host) in enumerate(_hosts(model, layer))
    ]
    notes = (
        "The sequence is the text's tokens, then the image's: its class token (the one prefix token) and its patches.",
        "The class token that the heads read is the text's, the first of the sequence.",
        "Patches come in random order, padded to the longest of the batch; only while read do they lie on a grid.",
    )
    encoder, text = model.encoder, model.embeddings.text_embeddings
    return Anatomy(family, model, stem, tuple(blocks), size, **normal, encoder=encoder, text=text, notes=notes)


def build_example(family: Family) -> nn.Module:
    """A small model of the family, untrained: the class `family.example` with a config of `family.options`."""
    import transformers

    cls = getattr(transformers, family.example)
    return cls(cls.config_class(**family.options))


_IMAGES = {"pixel_values", "pixel_values_videos", "grid_thw"}
_DEPTHS = re.compile(r"(num_|n_|encoder_|decoder_)(hidden_|encoder_|decoder_)?layers?|depth")


def vision_types() -> dict[str, Any]:
    """The model types of transformers whose model takes images or videos."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names: dict[str, list[str]] = {}
    for mapping in ("MODEL_MAPPING_NAMES", *(one for one in dir(auto) if one.endswith("_MAPPING_NAMES"))):
        for kind, named in getattr(auto, mapping).items() if mapping != "CONFIG_MAPPING_NAMES" else ():
            names.setdefault(kind, []).extend([named] if isinstance(named, str) else named or ())
    found = {}
    for kind in sorted(names):
        for name in dict.fromkeys(names[kind]):
            try:
                cls = getattr(transformers, name)
                takes = set(inspect.signature(cls.forward).parameters)
            except (AttributeError, ImportError, ValueError):  # another library is missing
                continue
            if _IMAGES & takes:
                found[kind] = cls
                break
    return found


def build_small(cls: Any) -> nn.Module:
    """A model of a default configuration with two layers per stack; as it is where that cannot be built."""
    try:
        return cls(_shallow(cls.config_class()))
    except Exception:  # configurations check themselves in many ways
        return cls(cls.config_class())


def _shallow(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shallow(value)
        elif isinstance(value, int) and value > 2 and _DEPTHS.fullmatch(name):
            setattr(config, name, 2)
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(config, name, value[:2])
    return config


_SMALL = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VIT = _SMALL | {"patch_size": 8, "intermediate_size": 64}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_PYRAMID = {"num_encoder_blocks": 4, "depths": [1, 2, 1, 1], "hidden_sizes": [16, 24, 32, 32]} | {
    "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [2, 2, 2, 2],
}


_DINO = _SMALL | {"patch_size": 8}

#: The families: where their code is, the classes a model is recognised by, its block's class, how it is dissected,
#: how its images are normalised, and the config of a small example.
_FAMILIES: tuple[tuple[str, str, tuple[str, ...], str, Any, dict[str, Any], dict[str, Any]], ...] = (
    ("vit", "vit", ("ViTModel",), "ViTLayer", _columnar, HALF, _VIT),
    ("deit", "deit", ("DeiTModel",), "DeiTLayer", _columnar, IMAGENET, _VIT),
    (
        "beit",
        "beit",
        ("BeitModel", "BeitBackbone"),
        "BeitLayer",
        _columnar,
        HALF,
        _VIT | {"use_relative_position_bias": True},
    ),
    ("data2vec_vision", "data2vec", ("Data2VecVisionModel",), "Data2VecVisionLayer", _columnar, HALF, _VIT),
    ("dinov2", "dinov2", ("Dinov2Model", "Dinov2Backbone"), "Dinov2Layer", _columnar, IMAGENET, _DINO),
    (
        "dinov2_with_registers",
        "dinov2_with_registers",
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
        "Dinov2WithRegistersLayer",
        _columnar,
        IMAGENET,
        _DINO,
    ),
    ("dinov3_vit", "dinov3_vit", ("DINOv3ViTModel", "DINOv3ViTBackbone"), "DINOv3ViTLayer", _columnar, IMAGENET, _VIT),
    ("vit_msn", "vit_msn", ("ViTMSNModel",), "ViTMSNLayer", _columnar, IMAGENET, _VIT),
    ("ijepa", "ijepa", ("IJepaModel",), "IJepaLayer", _columnar, IMAGENET, _VIT),
    ("dpt", "dpt", ("DPTModel",), "DPTViTLayer", _columnar, HALF, _VIT),
    ("clip", "clip", ("CLIPVisionModel", "CLIPVisionTransformer"), "CLIPEncoderLayer", _columnar, CLIP, _VIT),
    ("siglip", "siglip", ("SiglipVisionModel", "SiglipVisionTransformer"), "SiglipEncoderLayer", _columnar, HALF, _VIT),
    (
        "altclip",
        "altclip",
        ("AltCLIPVisionModel", "AltCLIPVisionTransformer"),
        "AltCLIPEncoderLayer",
        _columnar,
        CLIP,
        _VIT,
    ),
    (
        "chinese_clip",
        "chinese_clip",
        ("ChineseCLIPVisionModel", "ChineseCLIPVisionTransformer"),
        "ChineseCLIPVisionLayer",
        _columnar,
        CLIP,
        _VIT,
    ),
    (
        "metaclip_2",
        "metaclip_2",
        ("MetaClip2VisionModel", "MetaClip2VisionTransformer"),
        "MetaClip2EncoderLayer",
        _columnar,
        CLIP,
        _VIT,
    ),
    (
        "clipseg",
        "clipseg",
        ("CLIPSegVisionModel", "CLIPSegVisionTransformer"),
        "CLIPSegEncoderLayer",
        _columnar,
        IMAGENET,
        _VIT,
    ),
    ("owlvit", "owlvit", ("OwlViTVisionModel", "OwlViTVisionTransformer"), "OwlViTEncoderLayer", _columnar, CLIP, _VIT),
    ("owlv2", "owlv2", ("Owlv2VisionModel", "Owlv2VisionTransformer"), "Owlv2EncoderLayer", _columnar, CLIP, _VIT),
    ("git", "git", ("GitVisionModel", "GitVisionTransformer"), "GitVisionEncoderLayer", _columnar, CLIP, _VIT),
    ("blip", "blip", ("BlipVisionModel",), "BlipEncoderLayer", _columnar, CLIP, _VIT),
    ("blip_2", "blip_2", ("Blip2VisionModel",), "Blip2EncoderLayer", _columnar, CLIP, _VIT),
    (
        "instructblip",
        "instructblip",
        ("InstructBlipVisionModel",),
        "InstructBlipEncoderLayer",
        _columnar,
        CLIP,
        _VIT,
    ),
    ("flava", "flava", ("FlavaImageModel",), "FlavaLayer", _columnar, CLIP, _VIT),
    ("aimv2", "aimv2", ("Aimv2VisionModel",), "Aimv2EncoderLayer", _columnar, CLIP, _VIT),
    ("swin", "swin", ("SwinModel", "SwinBackbone"), "SwinLayer", _windowed, IMAGENET, _SWIN),
    ("swinv2", "swinv2", ("Swinv2Model", "Swinv2Backbone"), "Swinv2Layer", _windowed, IMAGENET, _SWIN),
    ("donut_swin", "donut", ("DonutSwinModel",), "DonutSwinLayer", _windowed, HALF, _SWIN),
    (
        "maskformer_swin",
        "maskformer",
        ("MaskFormerSwinModel", "MaskFormerSwinBackbone"),
        "MaskFormerSwinLayer",
        _windowed,
        IMAGENET,
        _SWIN,
    ),
    ("pvt", "pvt", ("PvtModel",), "PvtLayer", _pyramid, IMAGENET, _PYRAMID | {"image_size": 64}),
    ("pvt_v2", "pvt_v2", ("PvtV2Model",), "PvtV2BlockLayer", _pyramid, IMAGENET, _PYRAMID | {"image_size": 64}),
    (
        "segformer",
        "segformer",
        ("SegformerModel",),
        "SegformerLayer",
        partial(_pyramid, default_size=512),
        IMAGENET,
        _PYRAMID,
    ),
    ("glpn", "glpn", ("GLPNModel",), "GLPNLayer", _pyramid, PLAIN, _PYRAMID),
    ("vilt", "vilt", ("ViltModel",), "ViltLayer", _vilt, HALF, _VIT | {"vocab_size": 50}),
)

#: Where a family's code is not in the file named after it.
_FILES = {"data2vec": "data2vec_vision", "donut": "donut_swin", "maskformer": "maskformer_swin"}


def _register_all() -> None:
    for name, folder, classes, layer, way, normal, options in _FAMILIES:
        file = f"transformers.models.{folder}.modeling_{_FILES.get(folder, folder)}"
        dissect = partial(way, family=name, layer=layer, **normal)
        register(Family(name, "transformers", tuple(f"{file}.{c}" for c in classes), dissect, classes[0], options))


_register_all()
