"""From a short plan of attribute names to a `Block`: the only place that looks inside modules.

A plan names places as "path<" (the input of the module at that path), "path>" (its output) or "path()" (the input of
that method), with the layout of the tokens there if it is not the block's own: "drop_path1< BHWC".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vitfocus.anatomy.block import AttentionKind, Block, GridRule, Layout, Port, Reader, Size, Step

Places = tuple[str | None, str | None, str | None]


@dataclass(frozen=True)
class Plan:
    """Where a kind of block keeps its parts; each of the tuples is (front, mid, end)."""

    norm: str | None = "norm1"
    attention: str | None = "attn"
    mlp: str | None = "mlp"
    pool: str | None = "norm1<"
    attention_places: Places = ("norm1>", "attn.proj<", "attn>")
    mlp_places: Places = ("mlp<", "mlp.fc2<", "mlp>")
    layout: Layout = "BNC"
    kind: AttentionKind = "global"
    reader: Reader | None = "call"


def build_block(
    host: nn.Module,
    plan: Plan,
    *,
    name: str,
    depth: int,
    stage: int,
    grid_rule: GridRule,
    build_size: Size,
    prefix_tokens: int = 0,
    class_token: bool = False,
    suffix: str = "",
    **more: Any,
) -> Block:
    """Resolve the plan on one block's module."""
    mlp = find(host, plan.mlp)
    attention = find(host, plan.attention)
    norm = find(host, plan.norm)
    width = _width(mlp, "input") or _width(attention, "input") or _width(norm, "input") or 0
    places = {"pool": plan.pool}
    places |= dict(zip(("attention.front", "attention.mid", "attention.end"), plan.attention_places, strict=True))
    places |= dict(zip(("mlp.front", "mlp.mid", "mlp.end"), plan.mlp_places, strict=True))
    ports = {key: port for key, place in places.items() if place and (port := _port(host, place, plan.layout, width))}
    if plan.kind in ("class", "none", "channel", "outlook"):
        ports.pop("pool", None)
    return Block(
        name=name,
        depth=depth,
        stage=stage,
        width=width,
        layout=plan.layout,
        prefix_tokens=prefix_tokens,
        class_token=class_token,
        host=host,
        mlp=mlp,
        attention=attention,
        norm=norm,
        attention_kind=plan.kind,
        reader=plan.reader if attention is not None else None,
        ports=ports,
        grid_rule=grid_rule,
        build_size=build_size,
        suffix=suffix,
        **more,
    )


@dataclass
class Trunk:
    """Collects a model's blocks in order of depth."""

    build_size: Size
    blocks: list[Block] = field(default_factory=list)

    def add(self, host: nn.Module, plan: Plan, name: str, rule: GridRule, stage: int = 0, **more: Any) -> None:
        """Resolve the plan on the next block's module."""
        depth = len(self.blocks)
        block = build_block(
            host, plan, name=name, depth=depth, stage=stage, grid_rule=rule, build_size=self.build_size, **more
        )
        self.blocks.append(block)


def find(host: nn.Module, path: str | None) -> nn.Module | None:
    """The module at a dotted path ("." is the host itself), or None where the path ends in nothing."""
    if path == ".":
        return host
    found: Any = host
    for part in path.split(".") if path else ():
        if isinstance(found, nn.Sequential | nn.ModuleList) and part.lstrip("-").isdigit():
            found = found[int(part)]
        else:
            found = getattr(found, part, None)
        if found is None:
            return None
    return found if path and isinstance(found, nn.Module) else None


def _port(host: nn.Module, place: str, layout: Layout, width: int) -> Port | None:
    place, _, own_layout = place.partition(" ")
    layout = own_layout or layout  # type: ignore[assignment]
    if place.endswith("()"):
        path, _, method = place[:-2].rpartition(".")
        module = find(host, path) if path else host
        return Port(module, method, layout, width) if module is not None and hasattr(module, method) else None
    side = {"<": "input", ">": "output"}[place[-1]]
    module = find(host, place[:-1])
    return Port(module, side, layout, _width(module, side) or width) if module is not None else None


def _width(module: nn.Module | None, side: str) -> int | None:
    """Channels that go into or come out of a module, as its first linear or convolution layer, or its last, tells."""
    if module is None:
        return None
    last = next((child for name in ("proj", "fc2", "out_proj") if (child := find(module, name)) is not None), module)
    layers = [m for m in (last if side == "output" else module).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if layers:
        layer = layers[0] if side == "input" else layers[-1]
        if isinstance(layer, nn.Linear):
            return layer.in_features if side == "input" else layer.out_features
        return layer.in_channels if side == "input" else layer.out_channels
    for inner in module.modules():
        weight = getattr(inner, "weight", None)
        if weight is not None and weight.ndim == 1:
            return int(weight.shape[0])
    return None


def pair(value: Any) -> Size:
    """An int or a pair as a pair of ints.

    >>> pair(7), pair([7, 5])
    ((7, 7), (7, 5))
    """
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def conv_step(conv: nn.Conv2d) -> Step:
    """The grid step of a convolution: (kernel, stride, padding)."""
    kernel, stride = pair(conv.kernel_size), pair(conv.stride)
    if isinstance(conv.padding, str):
        return kernel, stride, (0, 0) if conv.padding == "valid" else (kernel[0] // 2, kernel[1] // 2)
    return kernel, stride, pair(conv.padding)
