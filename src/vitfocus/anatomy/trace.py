"""One traced forward pass: which tensors came from which, and which module made them.

A `TorchFunctionMode` records every function that returns a tensor, and hooks record every call of a module. Each tensor
that enters or leaves a module gets a node of its own, because these are the places where a treatment can be inserted.
The pass runs in eval mode, without gradients, and leaves the model as it was.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfocus.anatomy.block import GridRule, Size
from vitfocus.core.modules import eval_mode, running_eagerly

SUMS = ("add", "__add__", "__iadd__", "add_", "__radd__", "addcmul", "sum")
SEARCH_DISTANCE = 1500  # nodes after an attention that are searched for its residual addition
_ACTIVATIONS = ("elu", "relu", "swish", "mish", "silu", "sigmoid", "tanh", "softplus")
#: The grid of tokens whose places are not known.
NOWHERE: Size = (0, 0)
_SOFTMAX = ("softmax", "_softmax")
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm")


@dataclass(eq=False)
class Call:
    """One call of a module. `source` and `result` are the nodes that an inserted treatment would receive."""

    name: str
    module: nn.Module
    outer: Call | None
    start: int
    end: int = -1
    source: int | None = None
    result: int | None = None

    @property
    def chain(self) -> list[Call]:
        """The call and those around it, from the inside."""
        return [self, *(self.outer.chain if self.outer is not None else [])]


@dataclass(eq=False)
class Core:
    """One softmax attention: its node, and the shapes (..., Q, D), (..., K, D) and (..., Q, K)."""

    node: int
    call: Call
    logits: tuple[int, ...]
    channels: int
    query: int | None = None
    key: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers one map has."""
        return math.prod(self.logits[-2:])


@dataclass(eq=False)
class Trace:
    """What one forward pass did. Node i was made by `ops[i]` from the nodes `parents[i]` during `calls_of[i]`."""

    ops: list[str] = field(default_factory=list)
    parents: list[tuple[int, ...]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    calls_of: list[Call | None] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    image: Size = (0, 0)
    frames: int = 0
    grids: set[tuple[int, ...]] = field(default_factory=set)

    def after(self, start: int, stop: int, without: int | None = None) -> set[int]:
        """The nodes up to `stop` that depend on node `start`, along paths that avoid the node `without`."""
        found = {start}
        for node in range(start + 1, stop + 1):
            if node != without and not found.isdisjoint(self.parents[node]):
                found.add(node)
        return found

    def before(self, node: int, first: int = 0) -> set[int]:
        """The nodes from `first` on that a node depends on, and itself."""
        found, left = {node}, [node]
        while left:
            for parent in self.parents[left.pop()]:
                if parent >= first and parent not in found:
                    found.add(parent)
                    left.append(parent)
        return found

    def sum_behind(self, core: Core) -> tuple[int | None, int | None]:
        """The addition that joins the branch of an attention and its shortcut: its node, and that of the shortcut."""
        reached = {core.node}
        for node in range(core.node + 1, min(len(self.ops), core.node + SEARCH_DISTANCE)):
            parents = self.parents[node]
            if reached.isdisjoint(parents):
                continue
            if self.ops[node] in SUMS and len(parents) > 1:
                one, other = parents[:2]
                if (one in reached) != (other in reached):
                    shortcut = other if one in reached else one
                    outside = core.call not in chain_of(self.calls_of[node])
                    alike = self.shapes[shortcut] == self.shapes[node] and self.ops[shortcut] != "leaf"
                    if alike and (outside or shortcut in self.before(core.node, shortcut)):
                        return node, shortcut
            reached.add(node)
        return None, None

    def in_order(self, node: int) -> bool:
        """Whether tokens are in row-major order: between the image and here, every reordering was undone.

        Tokens selected by an index, as in masked autoencoders, may be anywhere, and tokens after the patches would be
        mistaken for patches.
        Cutting windows and joining them again exchanges axes of a tensor with five or more of them, and leaves the
        number of channels as it was.
        """
        reordered, channels = 0, self.shapes[node][-1]
        crossed = False
        while self.parents[node]:
            shape, op = self.shapes[node], self.ops[node]
            if op in ("gather", "index_select", "take_along_dim"):
                return False
            if len(shape) >= 5 and op in ("permute", "transpose", "swapaxes", "movedim"):
                crossed = True
            if len(shape) <= 4:
                if crossed and shape[-1] == channels and shape[-2:] != self.image:
                    reordered += 1
                crossed, channels = False, shape[-1]
            made = [parent for parent in self.parents[node] if self.ops[parent] != "leaf"]
            if not made:
                break
            last = self.parents[node][-1]
            node = min(made) if op in SUMS else max(made, key=lambda one: (math.prod(self.shapes[one]), -one))
            if op in ("cat", "concat") and len(shape) == 3 and node != last and shape[1] > self.shapes[node][1]:
                return False
        return reordered % 2 == 0

    def mlp_behind(self, total: int, following: int) -> tuple[int | None, list[Call]]:
        """The next sum whose branch holds two linear maps around an activation, and the maps."""
        stop = min(len(self.ops), total + SEARCH_DISTANCE)
        maps = [one for one in self.calls if is_linear_map(one.module) and total < one.start < min(stop, following)]
        if len(maps) < 2:
            return None, []
        for node in range(maps[1].end + 1, stop):
            parents = self.parents[node]
            if self.ops[node] not in SUMS or len(parents) < 2:
                continue
            ancestors = self.before(node, total)
            inside = [one for one in maps if one.result in ancestors]
            if total not in ancestors or len(inside) < 2:
                continue
            behind = self.after(inside[-1].result or 0, node - 1)
            if (parents[0] in behind) == (parents[1] in behind):
                continue
            for first in range(len(inside) - 2, -1, -1):
                if self._is_mlp(inside[first:]):
                    return node, inside[first:]
        return None, []

    def _is_mlp(self, maps: Sequence[Call]) -> bool:
        first, last = maps[0], maps[-1]
        if first.source is None or last.result is None or last.source is None or first.result is None:
            return False
        shapes = self.shapes
        if math.prod(shapes[first.source]) != math.prod(shapes[last.result]):
            return False
        between = self.ops[first.result : last.source + 1]
        return any(word in op for op in between for word in _ACTIVATIONS)

    def place(self, count: int) -> tuple[int, Size | None]:
        """The number of tokens before the patches, and the grid of the patches, if any grid fits `count` tokens."""
        if not all(self.image):
            return 0, (1, count)
        for prefix in range(33):
            for grid in self.grids:
                if math.prod(grid) + prefix == count and self.stride_of(grid) is not None:
                    return prefix, (grid[0], grid[1])
        height, width = self.image
        for prefix in range(9):
            for stride in range(1, min(height, width) + 1):
                if (
                    height % stride == 0
                    and width % stride == 0
                    and (height // stride) * (width // stride) + prefix == count
                ):
                    return prefix, (height // stride, width // stride)
        return 0, None

    def stride_of(self, grid: Sequence[int]) -> int | None:
        """The stride between the image and a grid; None if both sides do not have the same."""
        height, width = self.image
        if len(grid) != 2 or min(*grid, height, width) < 1:
            return None
        for stride in dict.fromkeys((round(height / grid[0]), height // grid[0], -(-height // grid[0]))):
            if stride < 1:
                continue
            sides = [{side // stride, -(-side // stride)} for side in (height, width)]
            if grid[0] in sides[0] and grid[1] in sides[1]:
                return stride
        return None

    def rule(self, root: nn.Module, grid: Size | None) -> GridRule:
        """A rule for the grid: by patches that do not overlap it rounds down, by other convolutions up."""
        if grid is None or grid == NOWHERE:
            return GridRule((NOWHERE,))
        stride = self.stride_of(grid) if all(self.image) else None
        if stride is None:
            return GridRule((grid,))
        conv = next((m for m in root.modules() if isinstance(m, nn.Conv2d)), None)
        cut = conv.kernel_size[0] if conv is not None and conv.kernel_size == conv.stride else 1
        if cut > 1 and stride % cut == 0:
            rest: tuple[Any, ...] = ((stride // cut,),) if stride > cut else ()
            rule = GridRule(((cut, cut, 0), *rest))
        else:
            rule = GridRule(((stride,),))
        return rule if rule(self.image) == grid else GridRule((grid,))


def chain_of(call: Call | None) -> list[Call]:
    """The call and those around it, from the inside; empty for None."""
    return call.chain if call is not None else []


def common(one: Call, other: Call) -> Call | None:
    """The smallest call around both."""
    chain = other.chain
    return next((call for call in one.chain if call in chain), None)


def is_linear_map(module: nn.Module) -> bool:
    """Whether a module maps each token linearly: a linear layer, or a convolution of one pixel without groups."""
    if isinstance(module, nn.Conv2d | nn.Conv1d):
        return module.groups == 1 and all(side == 1 for side in (*module.kernel_size, *module.stride))
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear8bitLt", "Linear4bit")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name: normalising layers share no base class."""
    name = type(module).__name__.lower()
    return "norm" in name and not any(True for _ in module.children()) and "conv" not in name


class Tracer(TorchFunctionMode):
    """Records a forward pass of a module while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.stack: list[Call] = []

    def node_of(self, tensor: Tensor) -> int:
        """The node of a tensor; one that nothing made (a parameter, an input) is a leaf."""
        found = self.known.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        return self.add("leaf", (), tensor)

    def add(self, op: str, parents: tuple[int, ...], tensor: Tensor) -> int:
        """A new node for a tensor."""
        trace = self.trace
        trace.ops.append(op)
        trace.parents.append(parents)
        trace.shapes.append(tuple(tensor.shape))
        trace.calls_of.append(self.stack[-1] if self.stack else None)
        self.known[id(tensor)] = (weakref.ref(tensor), len(trace.ops) - 1)
        return len(trace.ops) - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        parents = tuple(self.node_of(one) for one in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        made = [args[0]] if name == "__setitem__" else _tensors(result)
        nodes = [self.add(name, parents, one) for one in made]
        if name == "conv2d" and result.ndim == 4:
            self.trace.grids.add(tuple(result.shape[2:]))
        if nodes and self.stack:
            self._note_core(func, name, args, kwargs, parents, nodes[0])
        return result

    def _note_core(self, func: Any, name: str, args: Any, kwargs: Any, parents: Any, node: int) -> None:
        trace = self.trace
        if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
            named = dict(zip(("query", "key"), args[:2], strict=False)) | kwargs
            query, key = named["query"], named["key"]
            sides = [self.node_of(query), self.node_of(key)]
            shape = (*query.shape[:-1], key.shape[-2])
            if func is F.multi_head_attention_forward:  # (N, B, C), projected inside
                shape = (query.shape[1] if query.ndim > 2 else 1, 1, query.shape[0], key.shape[0])
            trace.cores.append(Core(node, self.stack[-1], tuple(shape), int(query.shape[-1]), *sides))
        elif name in _SOFTMAX and len(trace.shapes[node]) >= 3:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim not in (-1, len(trace.shapes[node]) - 1):
                return
            product = self._product_before(node)
            if product is None:
                return
            common = [call for call in self.stack if call in trace.calls_of[product].chain]  # type: ignore[union-attr]
            factors = trace.parents[product][-2:]
            channels = trace.shapes[factors[0]][-1] if factors else 0
            trace.cores.append(Core(node, common[-1], trace.shapes[node], int(channels), *factors[:2]))

    def _product_before(self, node: int) -> int | None:
        """The product of queries and keys that a softmax normalises, if it is one: nearby, in the same module.

        A product with fewer numbers in a row, such as that of queries and relative positions, counts if no other does.
        """
        trace, left, seen, other = self.trace, [(node, 0)], set(), None
        around = next((call for call in reversed(self.stack) if call.module._modules), self.stack[0])
        while left:
            at, far = left.pop(0)
            if at < around.start or at in seen or far > 14 or trace.ops[at] in ("layer_norm", "batch_norm"):
                continue
            seen.add(at)
            if trace.ops[at] in _PRODUCTS and trace.calls_of[at] is not None and len(trace.parents[at]) > 1:
                if trace.shapes[at][-1] == trace.shapes[node][-1]:
                    return at
                other = at if other is None else other
                continue
            left += [(parent, far + 1) for parent in trace.parents[at]]
        return other

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Within the context, calls of the root and of the modules inside it are recorded."""
        with ExitStack() as stack:
            for name, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                before = module.register_forward_pre_hook(_Enter(self, name), with_kwargs=True)
                behind = module.register_forward_hook(self._leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(behind.remove)
            with self:
                yield

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        while self.stack and self.stack[-1].module is not module:  # left by an exception that was caught
            self.stack.pop()
        if not self.stack:
            return None
        call = self.stack[-1]
        if isinstance(output, Tensor):
            output = output.detach()
        elif type(output) in (tuple, list):
            output = type(output)(one.detach() if isinstance(one, Tensor) else one for one in output)
        self.stack.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        call.result = self.node_of(first) if isinstance(first, Tensor) else None
        call.end = len(self.trace.ops) - 1
        return output


class _Enter:
    """A pre-hook that starts a call and gives every tensor that goes into it a node of its own."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self.tracer, self.name = tracer, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer = self.tracer
        outer = tracer.stack[-1] if tracer.stack else None
        call = Call(self.name, module, outer, len(tracer.trace.ops))
        tracer.stack.append(call)
        tracer.trace.calls.append(call)
        args = tuple(one.detach() if isinstance(one, Tensor) else one for one in args)
        kwargs = {key: one.detach() if isinstance(one, Tensor) else one for key, one in kwargs.items()}
        first = args[0] if args else next((one for one in kwargs.values() if isinstance(one, Tensor)), None)
        call.source = tracer.node_of(first) if isinstance(first, Tensor) else None
        return args, kwargs


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def trace_forward(root: nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...]) -> Trace:
    """Run a module once on these inputs, positional or by name, and return what happened."""
    tracer = Tracer()
    given = inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs))
    pixels = next((v for v in given.values() if isinstance(v, Tensor) and v.ndim >= 4), None)
    if pixels is not None:
        tracer.trace.image = (int(pixels.shape[-2]), int(pixels.shape[-1]))
        tracer.trace.frames = int(pixels.shape[1]) if pixels.ndim == 5 else 0
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(eval_mode(root))
        stack.callback(_forget_cached_values, root)
        stack.enter_context(torch.no_grad())
        stack.enter_context(running_eagerly())
        stack.enter_context(tracer.watching(root))
        root(**inputs) if isinstance(inputs, Mapping) else root(*inputs)
    return tracer.trace


def _forget_cached_values(root: nn.Module) -> None:
    """Discard what modules keep in eval mode (LeViT its biases) and would still use after other weights are loaded."""
    root.train()
    root.eval()
