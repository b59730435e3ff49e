"""The reversible operations that insert a treatment, the hooks that route tokens through a module, and the `Surgeon`.

`ForwardContext` holds what a module deep inside a forward pass needs from its start: image size, padding mask, text
length.

All of them are plain objects rather than closures, so that a treated model can still be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, Port
from vitfocus.anatomy.block import ADDED_TOKENS
from vitfocus.core.errors import VitfocusError, warn
from vitfocus.treatments.base import Treatment


class StatefulModule(nn.Module):
    """An inserted module that holds tensors of the last forward pass."""

    def reset(self) -> None:
        """Drop these tensors, and with them the graph that they may be part of."""


class Operation(Protocol):
    """One reversible change to a model."""

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Undo it."""


@dataclass(eq=False)
class SetModule:
    """Adds a submodule, or replaces an existing one (`original`).

    Whenever it is inserted, it is moved to the mode, device and dtype of its host, or of the module that it replaces,
    if these have changed since it was removed.
    """

    host: nn.Module
    name: str
    module: nn.Module
    original: nn.Module | None = None
    last_state: tuple[Any, ...] = ()

    @property
    def current(self) -> nn.Module:
        """The module that has the name now: a library may have replaced it with a wrapper or a trained copy."""
        return self.host._modules.get(self.name) or self.module

    def apply(self) -> None:
        """Insert the module."""
        self._replace(self.original, self.module)

    def revert(self) -> None:
        """Remove it, or restore the original."""
        self.module = self.current
        self._replace(self.module, self.original)
        if isinstance(self.module, StatefulModule):
            self.module.reset()

    def _replace(self, old: nn.Module | None, new: nn.Module | None) -> None:
        leader = self.host if self.original is None or old is None else old
        before, self.last_state = self.last_state, _module_state(leader)
        if new is None:
            del self.host._modules[self.name]
            return
        mode, device, dtype = self.last_state
        if not before or mode != before[0]:
            new.train(mode)
        if device is not None and (device, dtype) != before[1:]:
            new.to(device=device, dtype=dtype)
        self.host._modules[self.name] = new


def _module_state(module: nn.Module) -> tuple[Any, ...]:
    """The mode, device and dtype of a module."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    return module.training, first.device if first is not None else None, first.dtype if first is not None else None


@dataclass(eq=False)
class AddHook:
    """Adds a hook on the input or output of a module; with `first`, it runs before existing hooks.

    It runs before the hooks by which transformers records outputs, which are added in the first forward pass.
    """

    module: nn.Module
    side: str
    hook: Callable[..., Any]
    first: bool = False

    def apply(self) -> None:
        """Register the hook."""
        if self.side == "input":
            self.module.register_forward_pre_hook(self.hook, with_kwargs=True, prepend=self.first)
        else:
            self.module.register_forward_hook(self.hook, prepend=self.first)
            hooks = self.module._forward_hooks
            for key in [key for key, hook in hooks.items() if str(hook.__module__).startswith("transformers.")]:
                hooks[key] = hooks.pop(key)

    def revert(self) -> None:
        """Remove it."""
        hooks = self.module._forward_pre_hooks if self.side == "input" else self.module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook == self.hook]:
            del hooks[key]
            self.module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclass(eq=False)
class Override:
    """Replaces a method of one instance by a callable."""

    module: nn.Module
    name: str
    replacement: Callable[..., Any]
    inner: Any = None

    def apply(self) -> None:
        """Install the replacement and store an earlier one."""
        self.inner = self.module.__dict__.get(self.name)
        self.module.__dict__[self.name] = self.replacement

    def revert(self) -> None:
        """Restore the class's method or the earlier replacement."""
        if self.inner is None:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.inner


@dataclass(eq=False)
class CountTokens:
    """Adds to the number of prefix tokens that a block, and modules in it, have stored."""

    host: nn.Module
    count: int

    def apply(self) -> None:
        """Add them."""
        self._change(self.count)

    def revert(self) -> None:
        """Subtract them."""
        self._change(-self.count)

    def _change(self, more: int) -> None:
        self.host.__dict__[ADDED_TOKENS] = self.host.__dict__.get(ADDED_TOKENS, 0) + more
        for module in self.host.modules():
            for name in ("prefix_tokens", "num_prefix_tokens"):  # of treatments; of timm's rotary attention
                if isinstance(known := getattr(module, name, None), int):
                    setattr(module, name, known + more)


class SubmoduleCall:
    """Calls a submodule, or a method of it, by its name, so that a wrapper that replaces it is called too."""

    def __init__(self, host: nn.Module, name: str, method: str = "__call__") -> None:
        self.host, self.name, self.method = host, name, method

    def __call__(self, *args: Any) -> Any:
        module = self.host._modules[self.name]
        return module(*args) if self.method == "__call__" else getattr(module, self.method)(*args)  # type: ignore[misc]


class InputHook:
    """A pre-hook that passes the first input of a module through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.function(args[0]), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor | torch.fx.Proxy))
        return args, {**kwargs, name: self.function(kwargs[name])}


class OutputHook:
    """A hook that passes the output of a module, or the first element of a tuple, through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.function(output[0]), *output[1:])
        return self.function(output)


class MethodWrapper:
    """Replaces a method of one instance: passes its first argument through a function."""

    def __init__(self, owner: nn.Module, method: str, function: Callable[[Tensor], Tensor]) -> None:
        self.owner = owner
        self.method = method
        self.function = function
        self.inner = owner.__dict__.get(method)

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(self.function(tokens), *args, **kwargs)
        return getattr(type(self.owner), self.method)(self.owner, self.function(tokens), *args, **kwargs)


@dataclass(eq=False)
class Surgeon:
    """Applies the operations of one treatment and records them, so that they can be undone.

    `places` lists where the treatment acts: the depth of a block and a place in it, as in `surgery.Placement`.
    """

    treatment: Treatment
    operations: list[Operation] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        """Apply an operation and record it."""
        operation.apply()
        self.operations.append(operation)

    def insert(self, block: Block, place: str, name: str, module: nn.Module) -> None:
        """Add a module to a block under a name, and route the tokens at one of its ports ("mlp.end") through it."""
        self.add(block, place, name, module)
        self.route(block.ports[place], module)

    def add(self, block: Block, place: str, name: str, module: nn.Module) -> None:
        """Add a module to a block under a name, on its device and in its dtype; reports show it at `place`."""
        name += block.suffix
        if hasattr(block.host, name):
            raise VitfocusError(f"{self.treatment.name} is applied to {block.name} already; untreat the model first.")
        self.apply(SetModule(block.host, name, module))
        self.places.append((block.depth, place))

    def replace(self, block: Block, part: str, module: nn.Module) -> None:
        """Replace the "attention" or "mlp" of a block."""
        original = getattr(block, part)
        parents = ((parent, *child) for parent in block.host.modules() for child in parent.named_children())
        parent, name = next((parent, name) for parent, name, child in parents if child is original)
        self.apply(SetModule(parent, name, module, original))
        self.places.append((block.depth, part))

    def route(self, port: Port, function: Callable[[Tensor], Tensor]) -> None:
        """Pass the tokens at a port through a module that was added, a method of it, or any function."""
        function = self.by_name(function)
        if port.side == "input":
            self.apply(AddHook(port.module, "input", InputHook(function)))
        elif port.side == "output":
            self.apply(AddHook(port.module, "output", OutputHook(function)))
        else:
            self.apply(Override(port.module, port.side, MethodWrapper(port.module, port.side, function)))

    def by_name(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A module that was added, or a method of it, looked up by its name whenever it is called."""
        owner, method = getattr(function, "__self__", function), getattr(function, "__name__", "__call__")
        for one in self.operations:
            if isinstance(one, SetModule) and one.module is owner:
                return SubmoduleCall(one.host, one.name, method)
        return function

    def modules(self) -> list[nn.Module]:
        """The modules that were inserted."""
        return [one.current for one in self.operations if isinstance(one, SetModule)]

    def undo(self) -> None:
        """Revert everything, last operation first."""
        for operation in reversed(self.operations):
            operation.revert()

    def redo(self) -> None:
        """Apply everything again, in order."""
        for operation in self.operations:
            operation.apply()

    def ports(self, blocks: Sequence[Block], *names: str) -> list[Block]:
        """The blocks that have all these ports; warns about blocks left out and raises if none is left."""
        able = [block for block in blocks if all(name in block.ports for name in names)]
        if not able:
            raise VitfocusError(
                f"{self.treatment} needs {' and '.join(names)} in a block, and no block of this model offers that."
            )
        if left := [block.name for block in blocks if block not in able]:
            warn(f"{self.treatment} leaves out {', '.join(left)}: no {' and '.join(names)} there.")
        return able


class ForwardContext:
    """Facts about the current forward pass of one transformer, set by hooks. All modules of one treatment share one."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.image_size: tuple[int, int] | None = None
        self.valid: Tensor | None = None
        self.text_tokens: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickle starts empty: a mask, or a traced size, may be part of a graph that cannot be copied."""
        return {"root": self.root, "image_size": None, "valid": None, "text_tokens": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardContext:
        """A copied transformer has its own; a copy of one inserted module, such as peft makes, keeps this one."""
        return memo.setdefault(id(self), ForwardContext(memo[id(self.root)])) if id(self.root) in memo else self

    def record_image_size(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the stem: store the size of the first four-dimensional tensor, the image."""
        self.image_size = None  # patches without an image must not get the size of an earlier image
        if args and isinstance(args[0], torch.fx.Proxy):
            image: Any = args[0].tracer.create_proxy("call_function", TracedSize(self), (args[0],), {})
            self.image_size = (image.shape[-2], image.shape[-1])
            return (image, *args[1:]), kwargs
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.image_size = (value.shape[-2], value.shape[-1])
                return None
        return None

    def record_padding(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the encoder: store which tokens are not padding, from the attention mask it receives."""
        named = (kwargs[name] for name in ("attention_mask", "attn_mask") if name in kwargs)
        mask = next(named, args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor):
            self.valid = None
            return
        # A boolean mask is True for real tokens; an additive one is 0 there and very negative for padding.
        real = mask if mask.dtype == torch.bool else mask > -1 if mask.is_floating_point() else mask != 0
        # No query attends to padding, so a token is real if any query may attend to it.
        self.valid = real.flatten(1, -2).any(dim=1) if real.ndim > 2 else real

    def record_text_length(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook of the text embedding: store how many tokens of the sequence are text."""
        tokens = output[0] if isinstance(output, tuple) else output
        self.text_tokens = tokens.shape[1]


class TracedSize:
    """A node of a graph traced by torch.fx that records the image size, for hooks that torch.fx did not trace."""

    __name__ = "record_image_size"

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, image: Tensor) -> Tensor:
        self.context.image_size = (image.shape[-2], image.shape[-1])
        return image


def track_image_size(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext:
    """Insert a hook that records the size of each image that enters the model."""
    context = ForwardContext(anatomy.root)
    surgeon.apply(AddHook(anatomy.stem, "input", context.record_image_size))
    return context


def track_sequence(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext | None:
    """Insert hooks that record padding and text length; None if the model takes neither."""
    if anatomy.encoder is None:
        return None
    context = ForwardContext(anatomy.root)
    surgeon.apply(AddHook(anatomy.encoder, "input", context.record_padding))
    if anatomy.text is not None:
        surgeon.apply(AddHook(anatomy.text, "output", context.record_text_length))
    return context


class TokenSlot:
    """Holds tokens that are passed from one place of a forward pass to another."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts empty: the tokens may be part of a graph that cannot be copied."""
        return {"tokens": None}
