"""The families of `vitfocus.models`: FAN, RVT, PVT v1 and LocalViT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vitfocus.anatomy.block import Anatomy, GridRule, Plan, Trunk, conv_step, pair
from vitfocus.anatomy.registry import Family, register

PRE_NORM = Plan()
FAN = Plan(mlp_places=("mlp<", "mlp.mlp_v.fc2<", "mlp>"))
RVT_CONV = Plan(mlp_places=("mlp<", "mlp.fc2< BCHW", "mlp>"))
CLASS_ATTENTION = Plan(kind="class")


def _fan(model: Any) -> Anatomy:
    stem, trunk = model.patch_embed, Trunk(pair(model.img_size))
    patch = getattr(stem, "patch_size", 0)
    rule = GridRule(((3, 2, 1),) * stem.halvings if hasattr(stem, "halvings") else ((patch, patch, 0),))
    for index, host in enumerate(model.blocks):
        trunk.add(host, FAN, f"blocks.{index}", rule)
    for index, host in enumerate(model.cls_attn_blocks):
        trunk.add(host, CLASS_ATTENTION, f"cls_attn_blocks.{index}", rule, prefix_tokens=1, class_token=True)
    return trunk.anatomy(model, stem)


def _rvt(model: Any) -> Anatomy:
    rule, trunk = GridRule(((7, 2, 2), (3, 2, 1), (4, 4, 0))), Trunk(pair(model.img_size))
    for stage, transformer in enumerate(model.transformers):
        rule = rule.then((3, 2, 1)) if stage else rule
        for index, host in enumerate(transformer.blocks):
            plan = RVT_CONV if isinstance(host.mlp.fc2, nn.Conv2d) else PRE_NORM
            trunk.add(host, plan, f"transformers.{stage}.blocks.{index}", rule, stage)
    return trunk.anatomy(model, model.patch_embed)


def _pvt(model: Any) -> Anatomy:
    rule, trunk = GridRule(()), Trunk(pair(model.img_size))
    for stage in range(model.num_stages):
        rule = rule.then(conv_step(getattr(model, f"patch_embed{stage + 1}").proj))
        last = stage == model.num_stages - 1
        for index, host in enumerate(getattr(model, f"block{stage + 1}")):
            reduction = getattr(host.attn, "sr", None)
            keys = rule.then(conv_step(reduction)) if reduction is not None else rule
            plan = PRE_NORM if keys is rule else Plan(kind="reduced")
            tokens = {"prefix_tokens": int(last), "class_token": last}
            trunk.add(host, plan, f"block{stage + 1}.{index}", rule, stage, key_rule=keys, **tokens)
    return trunk.anatomy(model, model.patch_embed1)


def _localvit(model: Any) -> Anatomy:
    rule, trunk = GridRule((conv_step(model.patch_embed.proj),)), Trunk(pair(model.img_size))
    # The locality feed-forward sees the patch tokens as an image; the class token passes it by.
    plan = Plan(mlp="conv")
    for index, host in enumerate(model.blocks):
        last = max(i for i, layer in enumerate(host.conv.conv) if isinstance(layer, nn.Conv2d))
        places = ("conv.conv< BCHW", f"conv.conv.{last}< BCHW", "conv.conv> BCHW")
        plan = replace(plan, mlp_places=places)
        trunk.add(host, plan, f"blocks.{index}", rule, prefix_tokens=1, class_token=True)
    return trunk.anatomy(model, model.patch_embed)


for _name, _class, _dissect, _example in (
    ("fan", "FAN", _fan, "fan_tiny_8_p4_hybrid"),
    ("rvt", "RVT", _rvt, "rvt_tiny"),
    ("pvt", "PVT", _pvt, "pvt_tiny"),
    ("localvit", "LocalViT", _localvit, "localvit_tiny"),
):
    register(Family(_name, "vitfocus", (f"vitfocus.models.{_name}.{_class}",), _dissect, _example))
