"""The reversible changes that surgery is made of, the gates that send tokens through a treatment, and the `Surgeon`.

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
from vitfocus.core.errors import VitfocusError, warn
from vitfocus.treatments.base import Treatment


class Recording(nn.Module):
    """An inserted module that remembers something of the last forward pass."""

    def forget(self) -> None:
        """Forget it, and the graph that it may be part of."""


class Operation(Protocol):
    """One reversible change to a model."""

    def apply(self) -> None:
        """Make the change."""

    def revert(self) -> None:
        """Undo it."""


@dataclass(eq=False)
class AddModule:
    """A new submodule."""

    host: nn.Module
    name: str
    module: nn.Module
    left: tuple[Any, ...] = ()

    def apply(self) -> None:
        """Attach the submodule, moved to the device, dtype and mode that its host has now."""
        if self.left:
            follow(self.module, self.host, self.left)
        self.host.add_module(self.name, self.module)

    @property
    def present(self) -> nn.Module:
        """What is attached now: a library may have put a wrapper or a trained copy of the submodule in its place."""
        return self.host._modules.get(self.name) or self.module

    def revert(self) -> None:
        """Detach it and drop what it holds of the last forward pass."""
        self.module = self.present
        del self.host._modules[self.name]
        self.left = placement_of(self.host)
        if isinstance(self.module, Recording):
            self.module.forget()


@dataclass(eq=False)
class SwapModule:
    """A module replaced by another."""

    host: nn.Module
    name: str
    module: nn.Module
    original: tuple[nn.Module]
    since: tuple[Any, ...] = ()

    @property
    def present(self) -> nn.Module:
        """What is in its place now."""
        return self.host._modules.get(self.name) or self.module

    def apply(self) -> None:
        """Put the new one in."""
        self._swap(self.original[0], self.module)

    def revert(self) -> None:
        """Put the original back."""
        self.module = self.present
        self._swap(self.module, self.original[0])

    def _swap(self, out: nn.Module, into: nn.Module) -> None:
        """Exchange the two, moving the new one to the device, dtype and mode of the old one."""
        if self.since:
            follow(into, out, self.since)
        self.since = placement_of(out)
        self.host._modules[self.name] = into


def placement_of(module: nn.Module) -> tuple[Any, ...]:
    """A module's mode, device and dtype."""
    placed = next((p for p in module.parameters() if p.is_floating_point()), None)
    return module.training, placed.device if placed is not None else None, placed.dtype if placed is not None else None


def follow(module: nn.Module, leader: nn.Module, before: tuple[Any, ...]) -> None:
    """Move a module to the leader's mode, device and dtype if these have changed since `before`."""
    mode, device, dtype = placement_of(leader)
    if mode != before[0]:
        module.train(mode)
    if device is not None and (device, dtype) != before[1:]:
        module.to(device=device, dtype=dtype)


@dataclass(eq=False)
class AddHook:
    """A hook on the input or the output of a module; with `first`, it runs before the hooks that are there."""

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

    def revert(self) -> None:
        """Remove it."""
        hooks = self.module._forward_pre_hooks if self.side == "input" else self.module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self.hook]:
            del hooks[key]
            self.module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclass(eq=False)
class Override:
    """A method of one instance replaced by a callable."""

    module: nn.Module
    name: str
    replacement: Callable[..., Any]
    inner: Any = None

    def apply(self) -> None:
        """Install the replacement and remember an earlier one."""
        self.inner = self.module.__dict__.get(self.name)
        self.module.__dict__[self.name] = self.replacement

    def revert(self) -> None:
        """Restore the class's method or the earlier replacement."""
        if self.inner is None:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.inner


class Inserted:
    """Calls the submodule of a name, or a method of it, so that a wrapper that replaces the submodule is called too."""

    def __init__(self, host: nn.Module, name: str, method: str = "__call__") -> None:
        self.host, self.name, self.method = host, name, method

    def __call__(self, *args: Any) -> Any:
        module = self.host._modules[self.name]
        return module(*args) if self.method == "__call__" else getattr(module, self.method)(*args)  # type: ignore[misc]


class InputGate:
    """A pre-hook that sends the tokens through a treatment before a module sees them."""

    def __init__(self, treat: Callable[[Tensor], Tensor]) -> None:
        self.treat = treat

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.treat(args[0]), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor | torch.fx.Proxy))
        return args, {**kwargs, name: self.treat(kwargs[name])}


class OutputGate:
    """A hook that sends a module's output through a treatment; of a tuple, the first part."""

    def __init__(self, treat: Callable[[Tensor], Tensor]) -> None:
        self.treat = treat

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.treat(output[0]), *output[1:])
        return self.treat(output)


class MethodGate:
    """Replaces a method: calls the original with treated tokens."""

    def __init__(self, owner: nn.Module, method: str, treat: Callable[[Tensor], Tensor]) -> None:
        self.owner = owner
        self.method = method
        self.treat = treat
        self.inner = owner.__dict__.get(method)

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(self.treat(tokens), *args, **kwargs)
        return getattr(type(self.owner), self.method)(self.owner, self.treat(tokens), *args, **kwargs)


@dataclass(eq=False)
class Surgeon:
    """Applies the operations of one treatment and records them, so that they can be undone."""

    treatment: Treatment
    operations: list[Operation] = field(default_factory=list)

    def do(self, operation: Operation) -> None:
        """Apply an operation and remember it."""
        operation.apply()
        self.operations.append(operation)

    def add(self, block: Block, name: str, module: nn.Module) -> nn.Module:
        """Add a submodule to a block, with the device, dtype and mode of the block."""
        name += block.suffix
        if hasattr(block.host, name):
            raise VitfocusError(f"{self.treatment.name} is applied to {block.name} already; untreat the model first.")
        placed = next((p for p in block.host.parameters() if p.is_floating_point()), None)
        if placed is not None:
            module = module.to(device=placed.device, dtype=placed.dtype)
        self.do(AddModule(block.host, name, module.train(block.host.training)))
        return module

    def gate(self, port: Port, module: Callable[[Tensor], Tensor]) -> None:
        """Send the tokens at a port through a module, a method of one, or a function."""
        module = self.found(module)
        if port.side == "input":
            self.do(AddHook(port.module, "input", InputGate(module)))
        elif port.side == "output":
            self.do(AddHook(port.module, "output", OutputGate(module)))
        else:
            self.do(Override(port.module, port.side, MethodGate(port.module, port.side, module)))

    def found(self, called: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A submodule that was added, or a method of it, found by its name whenever it is called."""
        owner, method = getattr(called, "__self__", called), getattr(called, "__name__", "__call__")
        for one in self.operations:
            if isinstance(one, AddModule) and one.module is owner:
                return Inserted(one.host, one.name, method)
        return called

    def modules(self) -> list[nn.Module]:
        """The modules that were inserted."""
        return [one.present for one in self.operations if isinstance(one, AddModule | SwapModule)]

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


class TokenSlot:
    """Tokens on their way from one place of a forward pass to another."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts empty: the tokens may be part of a graph that cannot be copied."""
        return {"tokens": None}


def grad_is_recomputed() -> bool:
    """Whether this forward runs inside a backward pass, because gradient checkpointing recomputes a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ImageSizeHook:
    """A pre-hook of the stem: the first four-dimensional tensor is the image."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.context.image_size = None  # patches without an image must not get the size of an earlier image
        if args and isinstance(args[0], torch.fx.Proxy):
            noted: Any = args[0].tracer.create_proxy("call_function", TracedSize(self.context), (args[0],), {})
            self.context.image_size = (noted.shape[-2], noted.shape[-1])
            return (noted, *args[1:]), kwargs
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim == 4:
                self.context.image_size = (value.shape[-2], value.shape[-1])
                return None
        return None


class TracedSize:
    """A node of a traced graph that does what `ImageSizeHook` does: hooks that torch.fx did not trace need the size."""

    __name__ = "note_image_size"

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, image: Tensor) -> Tensor:
        self.context.image_size = (image.shape[-2], image.shape[-1])
        return image


class PaddingHook:
    """A pre-hook of the encoder: which tokens are not padding, from the attention mask it receives."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (kwargs[name] for name in ("attention_mask", "attn_mask") if name in kwargs)
        mask = next(named, args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor):
            self.context.valid = None
            return
        # A boolean mask is True for real tokens; an additive one is 0 there and very negative for padding.
        real = mask if mask.dtype == torch.bool else mask > -1 if mask.is_floating_point() else mask != 0
        # No query attends to padding, so a token is real if any query may attend to it.
        self.context.valid = real.flatten(1, -2).any(dim=1) if real.ndim > 2 else real


class TextLengthHook:
    """A hook of the text embedding: how many tokens of the sequence are text."""

    def __init__(self, context: ForwardContext) -> None:
        self.context = context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tokens = output[0] if isinstance(output, tuple) else output
        self.context.text_tokens = tokens.shape[1]


def track_image_size(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext:
    """Insert a hook that records the size of each image that enters the model."""
    context = ForwardContext(anatomy.root)
    surgeon.do(AddHook(anatomy.stem, "input", ImageSizeHook(context)))
    return context


def track_sequence(anatomy: Anatomy, surgeon: Surgeon) -> ForwardContext | None:
    """Insert hooks that record padding and text length; None if the model takes neither."""
    if anatomy.encoder is None:
        return None
    context = ForwardContext(anatomy.root)
    surgeon.do(AddHook(anatomy.encoder, "input", PaddingHook(context)))
    if anatomy.text is not None:
        surgeon.do(AddHook(anatomy.text, "output", TextLengthHook(context)))
    return context
