"""Find the blocks of a model without a registered family, from one traced forward pass.

Every softmax attention in the trace becomes a block. The addition after it is the residual connection, the norm before
it starts its branch, and two linear maps around an activation before the next addition are the MLP. A place becomes a
port only if the trace confirms it: every path from the attention to the addition goes through it, the shortcut does
not, and its shape covers the block's tokens. The share of these checks that passed is the confidence of the result.

The result is stored on the model as plain names and numbers, so that copies of the model have it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vitfocus.anatomy.block import Anatomy, Block, GridRule, Layout, Port, Size, heads_of, query_key
from vitfocus.anatomy.trace import (
    NOWHERE,
    SEARCH_DISTANCE,
    Call,
    Core,
    Trace,
    chain_of,
    common,
    is_linear_map,
    is_norm,
    trace_forward,
)
from vitfocus.core.errors import VitfocusError

_KEPT = "_vitfocus_structure"
_MOST_NUMBERS = 500_000_000  # parameters of a model that is copied to the CPU

PortNames = tuple[str, str, Layout, int]
#: Gives the inputs on which a module may run, likeliest first.
Inputs = Callable[[nn.Module], Iterable[Mapping[str, Any] | tuple[Any, ...]]]


@dataclass(frozen=True)
class Part:
    """One block as names and numbers: its modules, its ports, the other facts of a `Block`, and the checks' results."""

    modules: Mapping[str, str | None]
    ports: Mapping[str, PortNames]
    facts: Mapping[str, Any]
    passed: Mapping[str, bool]


@dataclass(frozen=True)
class Structure:
    """What was found in a model: its blocks, or the reason why there are none."""

    parts: tuple[Part, ...]
    stem: str
    build_size: Size
    refusal: str = ""

    @property
    def confidence(self) -> float:
        """The share of the checks that passed."""
        passed = [held for part in self.parts for held in part.passed.values()]
        return round(sum(passed) / len(passed), 2) if passed else 0.0


def structure_of(root: nn.Module, inputs: Inputs, again: bool = False) -> Structure:
    """The structure of a module from a traced forward pass, or from an earlier one if it has been traced before."""
    kept: Structure | None = root.__dict__.get(_KEPT)
    if kept is None or again or not _fits(kept, root):
        kept = _find(root, inputs)
        root.__dict__[_KEPT] = kept
    return kept


def _fits(kept: Structure, root: nn.Module) -> bool:
    try:
        for part in kept.parts:
            for name in (*part.modules.values(), *(port[0] for port in part.ports.values())):
                root.get_submodule(name or "")
    except AttributeError:
        return False
    return True


def _find(root: nn.Module, inputs: Inputs) -> Structure:
    trace, error = _run(root, inputs)
    if trace is None and (copied := _in_memory(root)) is not None:
        with torch.device("cpu"):
            trace, error = _run(copied, inputs)  # values decide what the forward pass does
    if trace is None:
        return Structure((), "", (0, 0), _cannot_run(root, error))
    found = _Finder(root, trace).structure()
    return found if found.parts else replace(found, refusal=_no_softmax(root))


def _run(root: nn.Module, inputs: Inputs) -> tuple[Trace | None, Exception | None]:
    """The trace of the first input that shows attention, or of any that the module takes, or what it raised."""
    trace, error = None, None
    for one in inputs(root):
        try:
            trace = trace_forward(root, one)
        except Exception as problem:  # a model may raise any exception on inputs it does not accept
            error = error or problem
            continue
        if trace.cores:
            break
    return trace, error


def _in_memory(root: nn.Module) -> nn.Module | None:
    """A copy on the CPU of a module that occupies no memory, if it is small enough."""
    tensors = [*root.parameters(), *root.buffers()]
    if not any(one.is_meta for one in tensors) or sum(one.numel() for one in tensors) > _MOST_NUMBERS:
        return None
    copied = copy.deepcopy(root).to_empty(device="cpu")
    with torch.no_grad():
        for one in (*copied.parameters(), *copied.buffers()):
            one.fill_(0.02) if one.is_floating_point() else one.zero_()
    return copied


def _cannot_run(root: nn.Module, error: Exception | None) -> str:
    if error is None:
        return "its forward takes no image, video or text under a name that is known"
    text = str(error).strip().split("\n")[0][:160] or type(error).__name__
    return f"a forward pass on an example input failed ({type(error).__name__}: {text})"


def _no_softmax(root: nn.Module) -> str:
    mixing = [type(m).__name__ for m in root.modules() if _is_attention_by_name(m)]
    if mixing:
        listed = ", ".join(dict.fromkeys(mixing))
        return f"its forward pass computes no softmax over scores of tokens: {listed} mixes tokens without one"
    return "its forward pass computes no softmax attention"


def _is_attention_by_name(module: nn.Module) -> bool:
    name = type(module).__name__
    return "attention" in name.lower() or "Attn" in name or name.endswith("MLA")


class _Finder:
    """Turns a trace into parts."""

    def __init__(self, root: nn.Module, trace: Trace) -> None:
        self.root, self.trace = root, trace
        self.counts: dict[str, int] = {}
        for call in trace.calls:
            self.counts[call.name] = self.counts.get(call.name, 0) + 1
        self.cores = self._first_of_each_module()
        self.maps = [call for call in trace.calls if is_linear_map(call.module) and call.result is not None]
        self.has_class_token = any(
            "cls" in name or "class_token" in name or "class_embed" in name
            for name, parameter in root.named_parameters()
            if parameter.ndim <= 3
        )

    def _first_of_each_module(self) -> list[Core]:
        """Of each module the attention of its first call; of several in one call the largest, which is also read."""
        found: dict[str, Core] = {}
        for core in self.trace.cores:
            first = found.setdefault(core.call.name, core)
            found[core.call.name] = core if core.call is first.call and core.numbers > first.numbers else first
        return list(found.values()) or self._without_softmax()

    def _without_softmax(self) -> list[Core]:
        """The modules that are called attention, in a model that computes no softmax of scores."""
        calls = [call for call in self.trace.calls if _is_attention_by_name(call.module) and call.result is not None]
        inner = [call for call in calls if not any(call in other.chain[1:] for other in calls)]
        return [Core(call.result or 0, call, (), 0) for call in inner]

    def structure(self) -> Structure:
        """The blocks in the order of their attention."""
        parts: list[Part] = []
        hosts: dict[str, int] = {}
        stages: dict[GridRule, int] = {}
        for index, core in enumerate(self.cores):
            following = self.cores[index + 1].call.start if index + 1 < len(self.cores) else len(self.trace.ops)
            part = self._part(core, following)
            if part.facts["attention_kind"] == "linear" and not (part.passed["shortcut"] and part.passed["mlp"]):
                continue  # attention in name only
            host, rule = part.modules["host"] or "", part.facts["grid_rule"]
            count = hosts.get(host, 0)
            hosts[host] = count + 1
            shared = count or self._attentions_in(host) > 1
            named = {
                "name": part.modules["attention"] if shared else host,
                "suffix": f"_{count}" if count else "",
                "stage": stages.setdefault(rule, len(stages)),
            }
            parts.append(replace(part, facts={**part.facts, **named}))
        return Structure(tuple(parts), self._stem(), self.trace.image)

    def _stem(self) -> str:
        """The outermost module that is given the image itself; the root if there is none."""
        for call in self.trace.calls[1:]:
            if call.source is not None and len(self.trace.shapes[call.source]) >= 4:
                if self.trace.shapes[call.source][-2:] == self.trace.image:
                    return call.name
                break
        return ""

    def _attentions_in(self, host: str) -> int:
        inside = host + "." if host else ""
        return sum(core.call.name == host or core.call.name.startswith(inside) for core in self.cores)

    def _part(self, core: Core, following: int) -> Part:
        trace, attention = self.trace, core.call
        total, shortcut = trace.sum_behind(core)
        second, maps = trace.mlp_behind(total, following) if total is not None else (None, [])
        host = self._host(core, total, second, maps)
        if maps and host not in maps[0].chain and not self._next_to(host, second):
            maps = []  # another block's
        norm = self._norm_before(core, shortcut)
        entry = norm if norm is not None else attention
        node = self._tokens(entry, host, shortcut)
        tokens = trace.shapes[node] if node is not None else ()
        prefix, grid = self._placed(tokens)
        width = self._channels(tokens, entry.module, grid)
        kind, window, query, key = self._kind(core, tokens, width, prefix, grid, shortcut)
        ordered = node is not None and trace.in_order(node)
        if not ordered:  # where tokens lie is not known
            window, query, key = None, NOWHERE, NOWHERE
        sides: dict[str, tuple[Call, str] | None] = {}
        if kind != "cross":
            if maps:
                sides |= self._mlp_sides(maps, second, host)
            sides |= self._attention_sides(core, norm, total, shortcut, tokens, grid)
            if host.result is not None and self._all_of(host.result, tokens):
                sides["block.end"] = (host, "output")
            if kind in ("class", "channel", "linear") or grid is None or not ordered or not all(trace.image):
                sides.pop("pool", None)
        found = {place: self._port(side, host, grid) for place, side in sides.items() if side is not None}
        ports = {place: port for place, port in found.items() if port is not None}
        mlp = common(maps[0], maps[-1]) if maps else None
        passed = {
            "shortcut": total is not None,
            "mlp": "mlp.end" in ports,
            "attention": "attention.end" in ports,
            "grid": grid is not None and ordered,
            "pool": "pool" in ports or kind in ("class", "channel", "linear"),
        }
        modules = {
            "host": host.name,
            "attention": attention.name,
            "mlp": mlp.name if mlp is not None and mlp is not host else None,
            "norm": norm.name if norm is not None else None,
        }
        # Tokens that the attention puts before the patches itself.
        added = core.logits[-1] - math.prod(grid) - prefix if kind == "global" and grid and key == grid else 0
        facts = {
            "width": width,
            "layout": self._layout(tokens, entry.module, grid) or (next(iter(ports.values()))[2] if ports else "BNC"),
            "attention_kind": kind,
            "grid_rule": trace.rule(self.root, grid),
            "query_rule": trace.rule(self.root, query) if query is not None and query != grid else None,
            "key_rule": trace.rule(self.root, key) if key is not None and key != grid else None,
            "window": window,
            "prefix_tokens": prefix + added,
            "added_tokens": added,
            "class_token": prefix > 0 and self.has_class_token,
        }
        return Part(modules, ports, facts, {"shortcut": total is not None} if kind == "cross" else passed)

    def _mlp_sides(self, maps: Sequence[Call], total: int | None, host: Call) -> dict[str, tuple[Call, str] | None]:
        first, last = maps[0], maps[-1]
        whole = common(first, last)
        if whole is None or whole in host.chain or total is None or whole in chain_of(self.trace.calls_of[total]):
            front, end = (first, "input"), (last, "output")
        else:
            opened = any(
                is_norm(call.module) and whole in call.chain and call.start < first.start
                for call in self._inside(whole)
            )
            front, end = (first if opened else whole, "input"), (whole, "output")
        sides: dict[str, tuple[Call, str] | None] = {"mlp.front": front, "mlp.mid": (last, "input"), "mlp.end": end}
        result = end[0].result
        if result is None or first.result is None or total is None:
            return sides | {"mlp.end": None}
        around = self.trace.after(first.result, total, without=result)
        if any(parent in around for parent in self.trace.parents[total]):
            sides["mlp.end"] = None
        return sides

    def _inside(self, whole: Call) -> list[Call]:
        return [call for call in self.trace.calls if whole.start <= call.start <= whole.end]

    def _host(self, core: Core, total: int | None, second: int | None, maps: Sequence[Call]) -> Call:
        """The smallest call that holds attention, sums and MLP; without the MLP if it would hold other blocks too."""
        attention, trace = core.call, self.trace
        wide = [attention, *maps, *(c for n in (total, second) if n is not None and (c := trace.calls_of[n]))]
        for calls in (wide, [attention, *([c] if total is not None and (c := trace.calls_of[total]) else [])]):
            chains = [one.chain for one in calls]
            host = next(call for call in chains[0] if all(call in chain for chain in chains))
            if self._attentions_in(host.name) == 1:
                return host
        return host if self._attentions_in(host.name) <= 4 and host.name else attention

    def _next_to(self, host: Call, total: int | None) -> bool:
        """Whether the module of a sum follows the host in a sequence: attention and MLP in residual modules."""
        other = self.trace.calls_of[total] if total is not None else None
        return other is not None and other.outer is host.outer

    def _norm_before(self, core: Core, shortcut: int | None) -> Call | None:
        """The norm that opens the branch: before attention, with no linear map or convolution between."""
        trace, attention = self.trace, core.call
        ancestors = trace.before(core.node, shortcut if shortcut is not None else max(0, core.node - SEARCH_DISTANCE))
        for call in reversed(trace.calls):
            if call.start >= core.node or call in attention.chain:
                continue
            if call.result is None or call.result not in ancestors:
                continue
            if is_norm(call.module):
                inside = attention in call.chain
                early = not any(
                    attention.start <= one.start < call.start and isinstance(one.module, nn.Linear | nn.Conv2d)
                    for one in self.trace.calls
                )
                if inside and not early:
                    continue  # a norm of queries or keys
                return None if shortcut is not None and self._reaches(call.result, shortcut) else call
            if call.start < attention.start and isinstance(call.module, nn.Linear | nn.Conv2d):
                return None
        return None

    def _reaches(self, node: int, later: int) -> bool:
        return later >= node and later in self.trace.after(node, later)

    def _tokens(self, entry: Call, host: Call, shortcut: int | None) -> int | None:
        """The node of the block's tokens: of the whole image where any of them are, else of its windows."""
        shapes = self.trace.shapes
        nodes = [node for node in (entry.source, host.source, shortcut, entry.result) if node is not None]
        shaped = [node for node in nodes if len(shapes[node]) in (3, 4)]
        return next((node for node in shaped if shapes[node][0] == 1), shaped[0] if shaped else None)

    def _placed(self, shape: tuple[int, ...]) -> tuple[int, Size | None]:
        """How many tokens come before the patches, and the grid of those."""
        if len(shape) == 4 and shape[0] == 1 and not self.trace.frames:
            for grid in (shape[2:], shape[1:3]):
                if self.trace.stride_of(grid) is not None:
                    return 0, (grid[0], grid[1])
            return 0, None
        if len(shape) != 3 or 1 not in shape[:2] or self.trace.frames:
            return 0, None
        return self.trace.place(max(shape[:2]))

    def _kind(
        self, core: Core, tokens: tuple[int, ...], width: int, prefix: int, grid: Size | None, shortcut: int | None
    ) -> tuple[str, Size | None, Size | None, Size | None]:
        """What mixes the tokens, the window, and the grids of queries and keys."""
        if not core.logits:
            return "linear", None, None, None
        queries, keys = core.logits[-2:]
        heads = heads_of(core.call.module) or (core.logits[-3] if len(core.logits) > 3 else 1)
        given = self.trace.shapes[core.call.source] if core.call.source is not None else (1,)
        if len(core.logits) == 3 and given and core.logits[0] == given[0]:
            heads = 1  # one after the other
        groups = math.prod(core.logits[:-2]) // max(heads, 1)
        count = math.prod(tokens) // width if tokens and width else 0
        if core.channels == count != queries and math.prod(core.logits[:-1]) == width:
            return "channel", None, grid, grid
        if shortcut is not None and core.key is not None and core.query is not None:
            apart = shortcut not in self.trace.before(core.key, shortcut)
            if apart and shortcut in self.trace.before(core.query, shortcut):
                return "cross", None, None, None
        if queries <= max(prefix, 1) and keys > queries and count > queries:
            return "class", None, grid, grid
        padded = queries == keys > count > 0 and (keys > count + 8 or self.trace.place(keys)[1] != grid)
        if groups > 1 or padded or (len(tokens) == 3 and tokens[0] > 1 and tokens[1] > 1):
            side = math.isqrt(keys)
            square = side * side == keys and keys == queries
            return "window", (side, side) if square else None, *((None, None) if square else (NOWHERE, NOWHERE))
        grids = [grid if number == count else self.trace.place(number)[1] or NOWHERE for number in (queries, keys)]
        if queries < count:
            return "pooled", None, grids[0], grids[1]
        if keys < queries:
            return "reduced", None, grids[0], grids[1]
        return "global", None, grids[0], grids[1]

    def _attention_sides(
        self,
        core: Core,
        norm: Call | None,
        total: int | None,
        shortcut: int | None,
        tokens: tuple[int, ...],
        grid: Size | None,
    ) -> dict[str, tuple[Call, str] | None]:
        trace, attention = self.trace, core.call
        sides: dict[str, tuple[Call, str] | None] = {}
        entry = norm or attention
        if self._opens(entry.source, core, shortcut, tokens):
            sides["pool"] = sides["attention.front"] = (entry, "input")
        if norm is not None and self._opens(norm.result, core, shortcut, tokens):
            sides["attention.front"] = (norm, "output")
        elif norm is not None:
            sides.pop("attention.front", None)
        if total is None:
            return sides
        last = [one for one in self.maps if one.start > core.node and attention in one.chain and one.end < total]
        middle = last[-1].source if last else None
        if middle is not None and middle in trace.after(core.node, total) and self._all_rows(middle, tokens):
            sides["attention.mid"] = (last[-1], "input")
        later = [call for call in trace.calls if attention.end < call.start < total]
        ends: list[tuple[Call, str]] = [(attention, "output"), *((call, "input") for call in later)]
        behind = trace.after(core.node, total)
        for call, side in ends:
            node = call.result if side == "output" else call.source
            if node is None or node not in behind or node >= total or not self._all_of(node, tokens):
                continue
            if not any(parent in trace.after(core.node, total, without=node) for parent in trace.parents[total]):
                sides["attention.end"] = (call, side)
                break
        return sides

    def _opens(self, node: int | None, core: Core, shortcut: int | None, tokens: tuple[int, ...]) -> bool:
        """Whether everything that attention sees of the block's tokens comes through a node, and not the shortcut."""
        if node is None or not self._all_of(node, tokens):
            return False
        trace = self.trace
        start = shortcut if shortcut is not None and shortcut < node else max(0, node - 1)
        apart = shortcut is None or not self._reaches(node, shortcut)
        return apart and core.node not in trace.after(start, core.node, without=node) and self._reaches(node, core.node)

    def _all_of(self, node: int, tokens: tuple[int, ...]) -> bool:
        """Whether a tensor holds all tokens of the block, in any layout."""
        shape = self.trace.shapes[node]
        return len(shape) in (3, 4) and math.prod(shape) == math.prod(tokens) and shape[0] == tokens[0]

    def _all_rows(self, node: int, tokens: tuple[int, ...]) -> bool:
        """The same for a tensor that may have more or fewer channels."""
        shape, batch = self.trace.shapes[node], tokens[:1]
        if len(shape) == 3:
            return shape[:1] == batch and shape[1] in (*tokens[1:], math.prod(tokens[1:3]), math.prod(tokens[2:]))
        return len(shape) == 4 and shape[:1] == batch and (shape[1:3] == tokens[1:3] or shape[2:] == tokens[2:])

    def _channels(self, shape: tuple[int, ...], module: nn.Module, grid: Size | None) -> int:
        layout = self._layout(shape, module, grid)
        return 0 if not shape else shape[1] if layout == "BCHW" else shape[-1]

    def _layout(self, shape: tuple[int, ...], module: nn.Module, grid: Size | None) -> Layout | None:
        if len(shape) == 3:
            return None if shape[1] == 1 < shape[0] else "BNC"
        if len(shape) != 4:
            return None
        first, last = shape[2:] == grid, shape[1:3] == grid
        if first != last:
            return "BCHW" if first else "BHWC"
        for inner in module.modules():
            if isinstance(inner, nn.Conv2d | nn.BatchNorm2d | nn.GroupNorm):
                return "BCHW"
            if isinstance(inner, nn.Linear | nn.LayerNorm):
                width = inner.in_features if isinstance(inner, nn.Linear) else inner.normalized_shape[-1]
                return "BCHW" if width == shape[1] != shape[3] else "BHWC"
        return None

    def _port(self, side: tuple[Call, str], host: Call, grid: Size | None) -> PortNames | None:
        call, which = side
        node = call.source if which == "input" else call.result
        if node is None or self.counts[call.name] != self.counts[host.name]:
            return None
        shape = self.trace.shapes[node]
        layout = self._layout(shape, call.module, grid)
        if layout is None:
            return None
        return call.name, which, layout, shape[1] if layout == "BCHW" else shape[-1]


def dissect_structure(root: nn.Module, inputs: Inputs, again: bool = False) -> Anatomy:
    """The anatomy of a module that no family's record describes; with `again`, an earlier pass does not count.

    Raises:
        VitfocusError: The module cannot be run or computes no softmax attention.
    """
    found = structure_of(root, inputs, again)
    if found.refusal:
        raise VitfocusError(found.refusal)
    blocks = tuple(_block(root, part, depth, found.build_size) for depth, part in enumerate(found.parts))
    stem = root.get_submodule(found.stem)
    return Anatomy(
        type(root).__name__, root, stem, blocks, found.build_size, found_by="structure", confidence=found.confidence
    )


def _block(root: nn.Module, part: Part, depth: int, size: Size) -> Block:
    modules: dict[str, Any] = {
        key: root.get_submodule(name) if name is not None else None for key, name in part.modules.items()
    }
    reader = None
    if part.facts["attention_kind"] not in ("channel", "linear"):
        reader = "multihead" if isinstance(modules["attention"], nn.MultiheadAttention) else "call"
    ports = {key: Port(root.get_submodule(one[0]), *one[1:]) for key, one in part.ports.items()}
    facts: dict[str, Any] = {**modules, **part.facts, "ports": ports, "reader": reader}
    return Block(depth=depth, build_size=size, query_key=query_key(modules["attention"]), **facts)
