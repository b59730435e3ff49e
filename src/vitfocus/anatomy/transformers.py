"""The families of Hugging Face transformers, recognised by full class names, so that the library is not imported.

Between 4.x and 5.x the library renamed most parts of its blocks, family by family (`attention.attention.query` became
`attention.q_proj`, `output.dense` became `mlp.fc2`), but not the classes of the blocks. So a block is found by its
class, and its parts by any of their known names.

The config of a model does not say how images are normalised. Each record has the values of the published checkpoints of
the family; the `image_mean` and `image_std` of an image processor beside the checkpoint take precedence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vitfocus.anatomy.block import Anatomy, GridRule, Plan, Size, Step, Trunk, conv_step, pair
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
        f"{type(host).__name__} has none of {', '.join(names)}: vitfocus does not know the names of its parts in this "
        "version of transformers."
    )


def _hosts(model: nn.Module, class_name: str) -> Iterator[tuple[str, Any]]:
    """The blocks: modules of that class, with their names."""
    for name, module in model.named_modules():
        if any(cls.__name__ == class_name for cls in type(module).__mro__):
            yield name, module


def _patch_embeddings(model: nn.Module) -> list[nn.Module]:
    """What turns pixels, or the stage before, into tokens: one module per stage."""
    found = [module for _, module in _named_embeddings(model)]
    return list(found[0]) if isinstance(found[0], nn.ModuleList) else found


def _named_embeddings(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = ("patch_embeddings", "patch_embedding", "patch_embed")
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    if not found:
        raise VitfocusError(f"{type(model).__name__} has no {' or '.join(names)}: its patch embedding is not known.")
    return found


def _prefix(model: nn.Module) -> dict[str, Any]:
    """The number of tokens before the patches, and whether the class token is the first of them."""
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


def _columnar(model: Any, layer: str, **more: Any) -> Anatomy:
    """Families with one list of equal blocks: ViT, DeiT, BEiT, DINO, the image towers of CLIP and similar models."""
    stem, trunk = _patch_embeddings(model)[0], Trunk(_build_size(model))
    rule, tokens = GridRule((conv_step(_conv(stem)),)), _prefix(model)
    for name, host in _hosts(model, layer):
        trunk.add(host, _plan(host), name, rule, **tokens)
    grows = not any("relative_position" in name for name, _ in model.named_modules())
    return trunk.anatomy(model, stem, takes_tokens=grows, **more)


def _stage(name: str) -> int:
    """The stage of a pyramid's block: the first number in its name ("encoder.block.2.0", "stages.2.blocks.0")."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def _windowed(model: Any, layer: str, **more: Any) -> Anatomy:
    """Swin, whose attention module sees windows, so the ports with all tokens are around it.

    Version 1 has its norm before the cut into windows and `drop_path` after attention. In version 2 the norm follows
    attention, and no module precedes the cut: the port is the method that pads the grid, which has two axes there.
    """
    stem, trunk = _patch_embeddings(model)[0], Trunk(_build_size(model))
    patches = GridRule(((conv_step(_conv(stem))[1],),))
    for name, host in _hosts(model, layer):
        plan, stage = replace(_plan(host), kind="window"), _stage(name)
        if layer == "Swinv2Layer":
            cut, window = "maybe_pad() BHWC", host.attention.self.window_size
            plan = replace(plan, pool=cut, attention_places=(cut, None, f"{plan.norm}<"))
        else:
            window = model.config.window_size
            plan = replace(plan, attention_places=(f"{plan.norm}>", None, "drop_path<"))
        trunk.add(host, plan, name, patches.then(*((2,),) * stage), stage, window=pair(window))
    return trunk.anatomy(model, stem, **more)


def _pyramid(model: Any, layer: str, default_size: int = 224, **more: Any) -> Anatomy:
    """PVT and its descendants: one convolution per stage, and attention to keys that another one has reduced."""
    embeddings, trunk = _patch_embeddings(model), Trunk(_build_size(model, default_size))
    steps = tuple(conv_step(_conv(embedding)) for embedding in embeddings)
    for name, host in _hosts(model, layer):
        stage, plan = _stage(name), _plan(host)
        rule = GridRule(steps[: stage + 1])
        reductions = _reductions(host.get_submodule(plan.attention or ""))
        # PVT has a class token in its last stage only.
        class_token = getattr(embeddings[stage], "cls_token", None) is not None
        tokens = {"prefix_tokens": int(class_token), "class_token": class_token}
        plan = replace(plan, kind="reduced" if reductions else "global")
        trunk.add(host, plan, name, rule, stage, key_rule=rule.then(*reductions), **tokens)
    return trunk.anatomy(model, embeddings[0], **more)


def _reductions(attention: nn.Module) -> tuple[Step, ...]:
    """The grid steps from queries to keys: a pooling to a fixed size (PVTv2 linear), a strided convolution."""
    return tuple(
        conv_step(module) if isinstance(module, nn.Conv2d) else pair(module.output_size)
        for module in attention.modules()
        if isinstance(module, nn.Conv2d | nn.AdaptiveAvgPool2d)
    )


def _vilt(model: Any, layer: str, **more: Any) -> Anatomy:
    stem, trunk = _patch_embeddings(model)[0], Trunk(_build_size(model, 384))
    rule = GridRule((conv_step(_conv(stem)),))
    for name, host in _hosts(model, layer):
        trunk.add(host, replace(_plan(host), pool=None), name, rule, prefix_tokens=1, class_token=True)
    notes = (
        "The sequence is the text's tokens, then the image's: its class token (the one prefix token) and its patches.",
        "The class token that the heads read is the text's, the first of the sequence.",
        "Patches come in random order, padded to the longest of the batch; only a diagnosis keeps them in order.",
    )
    parts = {"encoder": model.encoder, "text": model.embeddings.text_embeddings}
    return trunk.anatomy(model, stem, notes=notes, **parts, **more)


def build_example(family: Family) -> nn.Module:
    """A small model of the family, untrained: the class `family.example` with a config of `family.options`."""
    import transformers

    cls = getattr(transformers, family.example)
    return cls(cls.config_class(**family.options))


_IMAGES = {"pixel_values", "pixel_values_videos", "grid_thw"}
_DEPTHS = re.compile(r"(num_|n_|encoder_|decoder_)(hidden_|encoder_|decoder_)?layers?|depth|num_blocks")


def takes_images(cls: Any) -> bool:
    """Whether a class of transformers is a model of images or videos, by the arguments of its forward."""
    return not _IMAGES.isdisjoint(inspect.signature(cls.forward).parameters)


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
                takes = takes_images(cls)
            except (AttributeError, ImportError, ValueError):  # another library is missing
                continue
            if takes:
                found[kind] = cls
                break
    return found


def build_small(cls: Any) -> nn.Module:
    """A model of a default configuration, two layers per stack, and small images and clips if it can be built so."""
    try:
        return cls(_shrunk(cls.config_class()))
    except Exception:  # configurations check themselves in many ways
        return cls(cls.config_class())


#: Every pixel and frame costs tokens, and attention the square of them.
_LIMITS = {"image_size": 448, "frames_per_clip": 4}


def _shrunk(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shrunk(value)
        elif isinstance(value, int) and value > 2 and _DEPTHS.fullmatch(name):
            setattr(config, name, 2)
        elif isinstance(value, int) and value > _LIMITS.get(name, value):
            setattr(config, name, _LIMITS[name])
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


def _register(
    name: str,
    classes: str,
    layer: str,
    normalisation: dict[str, Any],
    dissect: Callable[..., Anatomy] = _columnar,
    options: dict[str, Any] = _VIT,
    file: str = "",
) -> None:
    """Register a family: the classes of a model, the class of its blocks, and the config of a small example.

    `file` is the path of its code in `transformers.models`, by default "NAME.modeling_NAME".
    """
    path = f"transformers.models.{file or f'{name}.modeling_{name}'}"
    full_names = tuple(f"{path}.{one}" for one in classes.split())
    dissect = partial(dissect, layer=layer, **normalisation)
    register(Family(name, "transformers", full_names, dissect, classes.split()[0], options))


_register("vit", "ViTModel", "ViTLayer", HALF)
_register("deit", "DeiTModel", "DeiTLayer", IMAGENET)
_register("beit", "BeitModel BeitBackbone", "BeitLayer", HALF, options=_VIT | {"use_relative_position_bias": True})
_register(
    "data2vec_vision", "Data2VecVisionModel", "Data2VecVisionLayer", HALF, file="data2vec.modeling_data2vec_vision"
)
_register("dinov2", "Dinov2Model Dinov2Backbone", "Dinov2Layer", IMAGENET, options=_DINO)
_register(
    "dinov2_with_registers",
    "Dinov2WithRegistersModel Dinov2WithRegistersBackbone",
    "Dinov2WithRegistersLayer",
    IMAGENET,
    options=_DINO,
)
_register("dinov3_vit", "DINOv3ViTModel DINOv3ViTBackbone", "DINOv3ViTLayer", IMAGENET)
_register("vit_msn", "ViTMSNModel", "ViTMSNLayer", IMAGENET)
_register("ijepa", "IJepaModel", "IJepaLayer", IMAGENET)
_register("dpt", "DPTModel", "DPTViTLayer", HALF)
_register("clip", "CLIPVisionModel CLIPVisionTransformer", "CLIPEncoderLayer", CLIP)
_register("siglip", "SiglipVisionModel SiglipVisionTransformer", "SiglipEncoderLayer", HALF)
_register("altclip", "AltCLIPVisionModel AltCLIPVisionTransformer", "AltCLIPEncoderLayer", CLIP)
_register("chinese_clip", "ChineseCLIPVisionModel ChineseCLIPVisionTransformer", "ChineseCLIPVisionLayer", CLIP)
_register("metaclip_2", "MetaClip2VisionModel MetaClip2VisionTransformer", "MetaClip2EncoderLayer", CLIP)
_register("clipseg", "CLIPSegVisionModel CLIPSegVisionTransformer", "CLIPSegEncoderLayer", IMAGENET)
_register("owlvit", "OwlViTVisionModel OwlViTVisionTransformer", "OwlViTEncoderLayer", CLIP)
_register("owlv2", "Owlv2VisionModel Owlv2VisionTransformer", "Owlv2EncoderLayer", CLIP)
_register("git", "GitVisionModel GitVisionTransformer", "GitVisionEncoderLayer", CLIP)
_register("blip", "BlipVisionModel", "BlipEncoderLayer", CLIP)
_register("blip_2", "Blip2VisionModel", "Blip2EncoderLayer", CLIP)
_register("instructblip", "InstructBlipVisionModel", "InstructBlipEncoderLayer", CLIP)
_register("flava", "FlavaImageModel", "FlavaLayer", CLIP)
_register("aimv2", "Aimv2VisionModel", "Aimv2EncoderLayer", CLIP)
_register("swin", "SwinModel SwinBackbone", "SwinLayer", IMAGENET, _windowed, _SWIN)
_register("swinv2", "Swinv2Model Swinv2Backbone", "Swinv2Layer", IMAGENET, _windowed, _SWIN)
_register("donut_swin", "DonutSwinModel", "DonutSwinLayer", HALF, _windowed, _SWIN, "donut.modeling_donut_swin")
_register(
    "maskformer_swin",
    "MaskFormerSwinModel MaskFormerSwinBackbone",
    "MaskFormerSwinLayer",
    IMAGENET,
    _windowed,
    _SWIN,
    "maskformer.modeling_maskformer_swin",
)
_register("pvt", "PvtModel", "PvtLayer", IMAGENET, _pyramid, _PYRAMID | {"image_size": 64})
_register("pvt_v2", "PvtV2Model", "PvtV2BlockLayer", IMAGENET, _pyramid, _PYRAMID | {"image_size": 64})
_register("segformer", "SegformerModel", "SegformerLayer", IMAGENET, partial(_pyramid, default_size=512), _PYRAMID)
_register("glpn", "GLPNModel", "GLPNLayer", PLAIN, _pyramid, _PYRAMID)
_register("vilt", "ViltModel", "ViltLayer", HALF, _vilt, _VIT | {"vocab_size": 50})
