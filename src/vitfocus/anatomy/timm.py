"""The families of timm, and of `vitfocus.models`, which timm builds too: one small function each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vitfocus.anatomy.block import Anatomy, AttentionKind, GridRule, Plan, Size, Step, Trunk, conv_step, pair
from vitfocus.anatomy.registry import Family, register

PRE_NORM = Plan()
POST_NORM = Plan(pool="attn<", attention_places=("attn<", "attn.proj<", "attn>"))
CLASS_ATTENTION = Plan(kind="class")


def _stem(model: Any) -> Any:
    if hasattr(model, "patch_embeds"):
        return model.patch_embeds[0]
    return next(getattr(model, name) for name in ("patch_embed", "embeds", "stem") if hasattr(model, name))


def _build_size(model: Any) -> Size:
    cfg = getattr(model, "pretrained_cfg", None) or {}
    size = getattr(_stem(model), "img_size", None) or cfg.get("input_size", (3, 224, 224))[-2:]
    return pair(size)


def _built_for(model: Any, grid: Size, stride: int) -> Size:
    """The image size of a model that does not store it, from a grid that its weights are made for and its stride."""
    size = _build_size(model)
    fits = (size[0] // stride, size[1] // stride) == grid
    return size if fits else (grid[0] * stride, grid[1] * stride)


def _patch_rule(model: Any) -> GridRule:
    """The grid of a timm `PatchEmbed` or `HybridEmbed`."""
    stem = _stem(model)
    ratio = pair(stem.feat_ratio(as_scalar=False)) if hasattr(stem, "feat_ratio") else pair(stem.patch_size)
    rounds_up = getattr(stem, "dynamic_img_pad", False) or hasattr(stem, "backbone")
    return GridRule(((ratio,),) if rounds_up else ((ratio, ratio, 0),))


def _columnar(model: Any, plans: Mapping[str, Plan], **more: Any) -> Anatomy:
    """Families with one list of equal blocks: ViT, BEiT, EVA, the mixers. `plans` are by the class of the block."""
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    first = getattr(model, "cls_token", None) is not None or getattr(model, "has_class_token", False)
    registers = int(getattr(model, "num_reg_tokens", 0))
    tokens = {"prefix_tokens": prefix, "class_token": prefix > 0 and first, "registers": registers}
    rule, trunk = _patch_rule(model), Trunk(_build_size(model))
    for index, host in enumerate(model.blocks):
        if type(host).__name__ == "ParallelThingsBlock":
            for branch in range(len(host.attns)):
                suffix = f"_{branch}" if branch else ""
                name = f"blocks.{index}.attns.{branch}"
                trunk.add(host, _parallel_branch(branch), name, rule, suffix=suffix, **tokens)
        else:
            plan = next((plans[cls.__name__] for cls in type(host).__mro__ if cls.__name__ in plans), plans[""])
            trunk.add(host, plan, f"blocks.{index}", rule, **tokens)
    return trunk.anatomy(model, _stem(model), **more)


def _parallel_branch(branch: int) -> Plan:
    attention, mlp = f"attns.{branch}", f"ffns.{branch}"
    return Plan(
        norm=f"{attention}.norm",
        attention=f"{attention}.attn",
        mlp=f"{mlp}.mlp",
        pool=f"{attention}.norm<",
        attention_places=(f"{attention}.norm>", f"{attention}.attn.proj<", f"{attention}.attn>"),
        mlp_places=(f"{mlp}.mlp<", f"{mlp}.mlp.fc2<", f"{mlp}.mlp>"),
    )


#: Attention and MLP share one projection, so neither has a separate input.
PARALLEL_SCALING = Plan(
    norm="in_norm",
    attention=".",
    mlp=None,
    pool=None,
    attention_places=(None, "attn_out_proj<", "attn_out_proj>"),
    mlp_places=(None, "mlp_out_proj<", "mlp_out_proj>"),
)

#: The blocks that a ViT of timm may be built of.
VIT = {"": PRE_NORM} | dict.fromkeys(("ResPostBlock", "EvaBlockPostNorm", "ResPostRelPosBlock"), POST_NORM)
VIT |= dict.fromkeys(("ParallelScalingBlock", "DiffParallelScalingBlock"), PARALLEL_SCALING)

MIXER = Plan(
    attention=None,
    mlp="mlp_channels",
    attention_places=(None, None, None),
    mlp_places=("mlp_channels<", "mlp_channels.fc2<", "mlp_channels>"),
    kind="none",
    reader=None,
)
MIXERS = {"": MIXER, "SpatialGatingBlock": replace(MIXER, norm="norm")}


def _naflexvit(model: Any) -> Anatomy:
    # Images of several sizes are given as patches, padded to the longest; every block receives the mask.
    return _columnar(model, VIT, encoder=model.blocks[0])


#: The attention module sees windows, so the ports with all tokens are around it: norm1 before, drop_path1 after.
SWIN = Plan(
    attention_places=("norm1>", None, "drop_path1<"),
    mlp_places=("mlp< BNC", "mlp.fc2< BNC", "mlp> BNC"),
    layout="BHWC",
    kind="window",
)
#: The norm follows attention, and no module precedes the cut into windows: the port is the method that cuts them.
SWIN_V2 = replace(SWIN, pool="_attn()", attention_places=("_attn()", None, "norm1<"))
SWIN_V2_CR = replace(SWIN, pool="_shifted_window_attn()", attention_places=("_shifted_window_attn()", None, "norm1<"))


def _swin(model: Any, plan: Plan, stages: str = "layers") -> Anatomy:
    rule, trunk = _patch_rule(model), Trunk(_build_size(model))
    for stage, layer in enumerate(getattr(model, stages)):
        if "downsample" in dict(layer.named_children()) and not isinstance(layer.downsample, nn.Identity):
            rule = rule.then((2,))
        for index, host in enumerate(layer.blocks):
            trunk.add(host, plan, f"{stages}.{stage}.blocks.{index}", rule, stage, window=pair(host.window_size))
    return trunk.anatomy(model, _stem(model))


def _sam(model: Any) -> Anatomy:
    # Windows are cut after norm1 and joined where there is no module, so there is no port at the end of attention.
    whole = replace(SWIN, attention_places=("norm1>", "attn.proj< BNC", "attn>"), kind="global")
    windowed = replace(SWIN, attention_places=("norm1>", None, None))
    rule, trunk = _patch_rule(model), Trunk(_build_size(model))
    for index, host in enumerate(model.blocks):
        window = pair(host.window_size) if host.window_size else None
        trunk.add(host, windowed if window else whole, f"blocks.{index}", rule, window=window)
    return trunk.anatomy(model, _stem(model))


def _twins(model: Any) -> Anatomy:
    rule, trunk = GridRule(()), Trunk(pair(model.patch_embeds[0].img_size))
    for stage, hosts in enumerate(model.blocks):
        rule = rule.then(conv_step(model.patch_embeds[stage].proj))
        for index, host in enumerate(hosts):
            reduction, window = getattr(host.attn, "sr", None), getattr(host.attn, "ws", None)
            kind: AttentionKind = "window" if window else "reduced" if reduction is not None else "global"
            trunk.add(
                host,
                Plan(kind=kind),
                f"blocks.{stage}.{index}",
                rule,
                stage,
                key_rule=rule.then(conv_step(reduction)) if reduction is not None else None,
                window=pair(window) if window else None,
            )
    return trunk.anatomy(model, _stem(model))


def _pit(model: Any) -> Anatomy:
    rule, trunk = GridRule((conv_step(model.patch_embed.conv),)), Trunk(_build_size(model))
    tokens = {"prefix_tokens": int(model.cls_token.shape[1]), "class_token": True}
    for stage, transformer in enumerate(model.transformers):
        if transformer.pool is not None:
            rule = rule.then(conv_step(transformer.pool.conv))
        for index, host in enumerate(transformer.blocks):
            trunk.add(host, PRE_NORM, f"transformers.{stage}.blocks.{index}", rule, stage, **tokens)
    return trunk.anatomy(model, _stem(model))


def _pvt_v2(model: Any) -> Anatomy:
    rule, trunk = GridRule((conv_step(model.patch_embed.proj),)), Trunk(_build_size(model))
    for stage, layer in enumerate(model.stages):
        if layer.downsample is not None:
            rule = rule.then(conv_step(layer.downsample.proj))
        for index, host in enumerate(layer.blocks):
            keys = rule
            if host.attn.pool is not None:
                keys = rule.then(pair(host.attn.pool.output_size))
            elif host.attn.sr is not None:
                keys = rule.then(conv_step(host.attn.sr))
            plan = PRE_NORM if keys is rule else Plan(kind="reduced")
            trunk.add(host, plan, f"stages.{stage}.blocks.{index}", rule, stage, key_rule=keys)
    return trunk.anatomy(model, _stem(model))


def _convit(model: Any) -> Anatomy:
    # The gated layers mix two softmaxes; the finished map is what their dropout receives.
    gated = Plan(reader="dropout")
    rule, trunk = _patch_rule(model), Trunk(_build_size(model))
    for index, host in enumerate(model.blocks):
        with_class = index >= model.local_up_to_layer
        plan = gated if hasattr(host.attn, "gating_param") else PRE_NORM
        trunk.add(host, plan, f"blocks.{index}", rule, prefix_tokens=int(with_class), class_token=with_class)
    return trunk.anatomy(model, _stem(model))


def _add_class_blocks(trunk: Trunk, hosts: Any, name: str, rule: GridRule, stage: int = 0) -> None:
    for index, host in enumerate(hosts):
        trunk.add(host, CLASS_ATTENTION, f"{name}.{index}", rule, stage, prefix_tokens=1, class_token=True)


def _cait(model: Any) -> Anatomy:
    rule, trunk = _patch_rule(model), Trunk(_build_size(model))
    for index, host in enumerate(model.blocks):
        trunk.add(host, PRE_NORM, f"blocks.{index}", rule)
    _add_class_blocks(trunk, model.blocks_token_only, "blocks_token_only", rule)
    return trunk.anatomy(model, _stem(model), takes_tokens=True)


def _xcit(model: Any) -> Anatomy:
    rule = GridRule(tuple(conv_step(m) for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d)))
    trunk = Trunk(_build_size(model))
    for index, host in enumerate(model.blocks):
        trunk.add(host, Plan(kind="channel"), f"blocks.{index}", rule)
    _add_class_blocks(trunk, model.cls_attn_blocks, "cls_attn_blocks", rule)
    return trunk.anatomy(model, _stem(model))


def _mvitv2(model: Any) -> Anatomy:
    embed, table = model.patch_embed.proj, getattr(model.stages[0].blocks[0].attn, "rel_pos_h", None)
    # A table of relative positions has 2n - 1 rows for n rows of tokens, and the model takes squares alone.
    size = _build_size(model) if table is None else _built_for(model, pair((len(table) + 1) // 2), embed.stride[0])
    rule, trunk = GridRule((conv_step(embed),)), Trunk(size)
    prefix = int(model.cls_token is not None)
    for stage, layer in enumerate(model.stages):
        for index, host in enumerate(layer.blocks):
            queries = rule.then(_pool_step(host.attn.pool_q)) if host.attn.pool_q is not None else rule
            keys = rule.then(_pool_step(host.attn.pool_k)) if host.attn.pool_k is not None else rule
            # Where the width grows, the shortcut is projected from norm1's output: pooling before norm1 would reach it,
            # and the input of attention comes after it.
            grows = host.shortcut_proj_attn is not None
            places = ("attn<", "attn.proj<", "attn>")
            plan = Plan(kind="pooled", pool=None if grows else "norm1<", attention_places=places)
            grids = {"query_rule": queries, "key_rule": keys}
            name = f"stages.{stage}.blocks.{index}"
            trunk.add(host, plan, name, rule, stage, prefix_tokens=prefix, class_token=bool(prefix), **grids)
            rule = queries
    return trunk.anatomy(model, _stem(model))


def _pool_step(pool: Any) -> Step:
    if isinstance(pool, nn.Conv2d):
        return conv_step(pool)
    return pair(pool.kernel_size), pair(pool.stride), pair(pool.padding)


def _davit(model: Any) -> Anatomy:
    window = Plan(attention_places=("norm1>", None, "drop_path1<"), kind="window")
    channel = Plan(kind="channel")
    rule, trunk = GridRule(((model.stem.stride[0],),)), Trunk(_build_size(model))
    for stage, layer in enumerate(model.stages):
        if isinstance(getattr(layer.downsample, "conv", None), nn.Conv2d):
            step = conv_step(layer.downsample.conv)
            rule = rule.then((step[1],) if layer.downsample.even_k else step)
        for outer, pair_of_blocks in enumerate(layer.blocks):
            for inner, host in pair_of_blocks.named_children():
                windowed = type(host).__name__ == "SpatialBlock"
                size = pair(host.window_size) if windowed else None
                name = f"stages.{stage}.blocks.{outer}.{inner}"
                trunk.add(host, window if windowed else channel, name, rule, stage, window=size)
    return trunk.anatomy(model, _stem(model))


def _maxxvit(model: Any) -> Anatomy:
    partition = Plan(attention_places=("norm1>", None, "ls1<"), layout="BHWC")
    parallel = replace(partition, attention="attn_block")
    full = Plan(layout="BCHW", attention_places=("norm1>", "attn.proj<", "attn>"))
    plans = {
        "PartitionAttentionCl": partition,
        "PartitionAttention2d": replace(partition, layout="BCHW"),
        "ParallelPartitionAttention": parallel,
        "TransformerBlock2d": full,
    }
    # The stem and each stage halve the grid; the convolutions pad so that it rounds up.
    trunk = Trunk(_maxxvit_size(model))
    rule = GridRule(((model.stem.stride,),))
    for stage, layer in enumerate(model.stages):
        before, rule = rule, rule.then((2,))
        for name, host in layer.named_modules():
            plan = plans.get(type(host).__name__)
            if plan is None:
                continue
            partition_size = getattr(host, "partition_size", None)
            is_grid = partition_size is not None and not getattr(host, "partition_block", True)
            kind: AttentionKind = "global" if partition_size is None else "grid" if is_grid else "window"
            # A block that halves the grid itself receives the finer one.
            shrinks = plan is full and type(getattr(host.norm1, "down", None)).__name__ == "Downsample2d"
            trunk.add(
                host,
                replace(plan, kind=kind),
                f"stages.{stage}.{name}",
                before if shrinks else rule,
                stage,
                query_rule=rule,
                key_rule=rule,
                window=None if partition_size is None else pair(partition_size),
            )
    return trunk.anatomy(model, _stem(model))


def _maxxvit_size(model: Any) -> Size:
    """A window is the 32nd part of the image; without windows, positions are those of a stage's whole grid."""
    for stage, layer in enumerate(model.stages):
        for host in layer.modules():
            if hasattr(host, "partition_size"):
                return _built_for(model, pair(host.partition_size), 32)
            positions: Any = getattr(getattr(host, "attn", None), "rel_pos", None)
            if hasattr(positions, "window_size"):
                return _built_for(model, pair(positions.window_size), model.stem.stride * 2 ** (stage + 1))
    return _build_size(model)


def _visformer(model: Any) -> Anatomy:
    # The first stage has convolutions alone; its blocks are like the others but for their attention.
    plan = Plan(layout="BCHW", mlp_places=("mlp<", "mlp.conv3<", "mlp>"))
    convolutional = replace(plan, norm="norm2", kind="none", reader=None)
    stem, trunk = model.stem, Trunk(pair(model.img_size))
    rule = GridRule(()) if stem is None else GridRule((conv_step(stem[0]),))
    for stage in range(3):
        embed = getattr(model, f"patch_embed{stage + 1}")
        rule = rule if embed is None else rule.then(conv_step(embed.proj))
        for index, host in enumerate(getattr(model, f"stage{stage + 1}")):
            kind = convolutional if host.attn is None else plan
            trunk.add(host, kind, f"stage{stage + 1}.{index}", rule, stage)
    return trunk.anatomy(model, model.patch_embed1 if stem is None else stem)


def _volo(model: Any) -> Anatomy:
    convs = [m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d)]
    halved = next(part.proj for part in model.network if not isinstance(part, nn.Sequential))
    # Positions are added after the one place where the grid shrinks.
    stride = math.prod(conv.stride[0] for conv in (*convs, halved))
    trunk = Trunk(_built_for(model, pair(model.pos_embed.shape[1:3]), stride))
    rule = GridRule(tuple(conv_step(conv) for conv in convs))
    plan = Plan(layout="BHWC")
    outlook = Plan(layout="BHWC", kind="outlook", reader=None)
    stage = 0
    for outer, part in enumerate(model.network):
        if isinstance(part, nn.Sequential):
            for inner, host in enumerate(part):
                kind = outlook if type(host).__name__ == "Outlooker" else plan
                trunk.add(host, kind, f"network.{outer}.{inner}", rule, stage)
        else:
            rule, stage = rule.then(conv_step(part.proj)), stage + 1
    _add_class_blocks(trunk, model.post_network or [], "post_network", rule, stage)
    return trunk.anatomy(model, _stem(model))


#: FAN, RVT, PVT v1 and LocalViT, which `vitfocus.models` registers with timm.
FAN = Plan(mlp_places=("mlp<", "mlp.mlp_v.fc2<", "mlp>"))
RVT_CONV = Plan(mlp_places=("mlp<", "mlp.fc2< BCHW", "mlp>"))


def _fan(model: Any) -> Anatomy:
    stem, trunk = model.patch_embed, Trunk(pair(model.img_size))
    patch = getattr(stem, "patch_size", 0)
    rule = GridRule(((3, 2, 1),) * stem.halvings if hasattr(stem, "halvings") else ((patch, patch, 0),))
    for index, host in enumerate(model.blocks):
        trunk.add(host, FAN, f"blocks.{index}", rule)
    _add_class_blocks(trunk, model.cls_attn_blocks, "cls_attn_blocks", rule)
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


def _register_all() -> None:
    vit, plain_vit = partial(_columnar, plans=VIT), partial(_columnar, plans=VIT, takes_tokens=True)
    swin, swin_v2 = partial(_swin, plan=SWIN), partial(_swin, plan=SWIN_V2)
    swin_v2_cr, two_stages = partial(_swin, plan=SWIN_V2_CR, stages="stages"), {"depths": (2, 2), "num_heads": (3, 6)}
    for names, dissect, example, options in (
        ("vision_transformer.VisionTransformer", plain_vit, "vit_tiny_patch16_224", {"depth": 2}),
        ("vision_transformer_relpos.VisionTransformerRelPos", vit, "vit_relpos_small_patch16_224", {"depth": 2}),
        ("beit.Beit", vit, "beit_base_patch16_224", {"depth": 2}),
        ("eva.Eva", plain_vit, "eva02_tiny_patch14_224", {"depth": 2}),
        ("swin_transformer.SwinTransformer", swin, "swin_tiny_patch4_window7_224", {"depths": (2, 2)}),
        ("swin_transformer_v2.SwinTransformerV2", swin_v2, "swinv2_tiny_window8_256", {"depths": (2, 2)}),
        ("swin_transformer_v2_cr.SwinTransformerV2Cr", swin_v2_cr, "swinv2_cr_tiny_224", two_stages),
        ("vision_transformer_sam.VisionTransformerSAM", _sam, "samvit_base_patch16_224", {"depth": 3}),
        ("naflexvit.NaFlexVit", _naflexvit, "naflexvit_base_patch16_gap", {"depth": 2}),
        ("twins.Twins", _twins, "twins_svt_small", {}),
        ("pit.PoolingVisionTransformer", _pit, "pit_ti_224", {}),
        ("pvt_v2.PyramidVisionTransformerV2", _pvt_v2, "pvt_v2_b0", {}),
        ("mlp_mixer.MlpMixer", partial(_columnar, plans=MIXERS), "mixer_s32_224", {}),
        ("convit.ConVit", _convit, "convit_tiny", {}),
        ("cait.Cait", _cait, "cait_xxs24_224", {"depth": 2}),
        ("xcit.Xcit", _xcit, "xcit_nano_12_p16_224", {"depth": 2}),
        ("mvitv2.MultiScaleVit", _mvitv2, "mvitv2_tiny", {}),
        ("davit.DaVit", _davit, "davit_tiny", {"depths": (1, 1, 1, 1)}),
        ("maxxvit.MaxxVit", _maxxvit, "maxvit_rmlp_pico_rw_256", {}),
        ("visformer.Visformer", _visformer, "visformer_tiny", {}),
        ("volo.VOLO", _volo, "volo_d1_224", {}),
    ):
        module = names.split(".")[0]
        register(Family(module, "timm", (f"timm.models.{names}",), dissect, example, options))
    for names, dissect, example in (
        ("fan.FAN", _fan, "fan_tiny_8_p4_hybrid"),
        ("rvt.RVT", _rvt, "rvt_tiny"),
        ("pvt.PVT", _pvt, "pvt_tiny"),
        ("localvit.LocalViT", _localvit, "localvit_tiny"),
    ):
        register(Family(names.split(".")[0], "vitfocus", (f"vitfocus.models.{names}",), dissect, example))


_register_all()
