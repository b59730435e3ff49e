"""Surgery: put treatments into a model in place, and take them out again without a trace.

Nothing existing is renamed or rewritten. A treatment is added as a submodule of the block it acts on and reached
through a hook at a port of that block; the few operations that made it so are kept on the model, each of which can undo
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitfocus.anatomy import Anatomy, anatomy, is_trained, mark_inserted, unwrap
from vitfocus.anatomy.trained import MARK
from vitfocus.core.errors import VitfocusError, warn
from vitfocus.treatments.base import Treatment, refuse_unused
from vitfocus.treatments.operations import AddModule, Surgeon, SwapModule
from vitfocus.treatments.spec import parse_treatments

_RECORD = "_vitfocus_treatments"
_PAUSED = "_vitfocus_paused"
Model = TypeVar("Model", bound=nn.Module)


_Handler = Callable[[Any, Anatomy, Surgeon], None]
_HANDLERS: dict[type[Treatment], _Handler] = {}


def handles(config: type[Treatment]) -> Callable[[_Handler], _Handler]:
    """Declare the function `(config, anatomy, surgeon)` that inserts a treatment."""

    def declare(function: _Handler) -> _Handler:
        _HANDLERS[config] = function
        return function

    return declare


def treat_(model: Model, *treatments: Treatment | str) -> Model:
    """Insert treatments into a model in place, in the order given, and return the model.

    Each may be a record or its spec ("cb(layers=upper)"). If one of them cannot be applied, none is. Where the model is
    trained and a treatment changes what it computes, a `VitfocusWarning` says so and names the form that would not.

    >>> import timm, vitfocus as vf
    >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
    >>> model = vf.treat_(model, vf.ContextBroadcasting(variant="scaled"), "tap(branches=2)")
    >>> vf.applied(model)
    [ContextBroadcasting(variant='scaled', site='mlp', position='end', layers='all', tokens='all'), \
TokenAwarePooling(mode='dilation', branches=2, layers='all', init='default')]
    """
    configs = [c for one in treatments for c in (parse_treatments(one) if isinstance(one, str) else [_checked(one)])]
    insert_all(model, configs)
    note_insertion(model, configs)
    return model


def insert_all(model: nn.Module, configs: Sequence[Treatment]) -> None:
    """`treat_`, for weights that were trained with these treatments or are yet to come."""
    if isinstance(model, DistributedDataParallel):
        raise VitfocusError(
            "Treat the model before wrapping it in DistributedDataParallel, which counts parameters once."
        )
    _refuse_while_paused(model)
    root = unwrap(model)
    treated_before = bool(_treated_roots(root))
    done: list[Surgeon] = []
    try:
        for config in sorted(configs, key=lambda c: not c.structural):
            if treated_before and config.structural:
                raise VitfocusError(f"{config} rebuilds blocks, so it must be applied before any other treatment.")
            surgeon = Surgeon(config)
            done.append(surgeon)
            refuse_unused(config)
            if type(config) not in _HANDLERS:
                raise VitfocusError(f"{type(config).__name__} has no handler: declare one with @handles.")
            _HANDLERS[type(config)](config, _anatomy_for(root, config), surgeon)
    except BaseException:
        for surgeon in reversed(done):
            surgeon.undo()
        raise
    order = {id(config): index for index, config in enumerate(configs)}
    root.__dict__[_RECORD] = [
        *root.__dict__.get(_RECORD, []),
        *sorted(done, key=lambda surgeon: order[id(surgeon.treatment)]),
    ]
    _forget_compiled_code()


def note_insertion(model: nn.Module, configs: Sequence[Treatment]) -> None:
    """Where a model is trained, mark it as carrying treatments since, and warn of those that change its function."""
    if not configs or not is_trained(anatomy(model).root):
        return
    mark_inserted(model, [str(config) for config in configs])
    if changing := [config for config in configs if not config.preserves_function]:
        warn(_changes(changing))


def _changes(configs: Sequence[Treatment]) -> str:
    """One sentence for treatments that change what trained weights compute, with their better forms."""
    forms = {str(config): config.preserving() for config in configs}
    better = "+".join(str(form) for form in forms.values() if form is not None)
    hopeless = "+".join(spec for spec, form in forms.items() if form is None)
    s = "s" if len(configs) == 1 else ""
    said = f"{'+'.join(forms)} change{s} what these trained weights compute"
    if not better:
        return f"{said} and no form of {hopeless} starts as the identity: train on before you use the model."
    other = f" (no form of {hopeless} does)" if hopeless else ""
    return f"{said}: use {better}, which starts as the identity{other}, or train on."


def untreat_(model: Model) -> Model:
    """Take every treatment out of a model in place: outputs and state-dict names are the original's, bit for bit."""
    _refuse_while_paused(model)
    for root in _treated_roots(model):
        for surgeon in _in_undo_order(root.__dict__.pop(_RECORD)):
            surgeon.undo()
    mark_inserted(model, ())
    _forget_compiled_code()
    return model


@contextmanager
def untreated(model: nn.Module) -> Iterator[nn.Module]:
    """Within the context the model is the original; on the way out, exceptions included, it is treated again.

    >>> import timm, vitfocus as vf
    >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "cbs")
    >>> with vf.untreated(model):
    ...     print(any("context" in name for name in model.state_dict()))
    False
    """
    roots = [(root, root.__dict__.pop(_RECORD), root.__dict__.pop(MARK, None)) for root in _treated_roots(model)]
    for root, record, _ in roots:
        root.__dict__[_PAUSED] = True
        for surgeon in _in_undo_order(record):
            surgeon.undo()
    _forget_compiled_code()
    try:
        yield model
    finally:
        for root, record, mark in roots:
            for surgeon in reversed(_in_undo_order(record)):
                surgeon.redo()
            root.__dict__[_RECORD] = record
            root.__dict__ |= {MARK: mark} if mark is not None else {}
            del root.__dict__[_PAUSED]
        _forget_compiled_code()


def applied(model: nn.Module) -> list[Treatment]:
    """The treatments a model carries, in order."""
    return [surgeon.treatment for surgeon in surgeons(model)]


def surgeons(model: nn.Module) -> list[Surgeon]:
    """What was done to a model for each of its treatments, in order."""
    return [surgeon for root in _treated_roots(model) for surgeon in root.__dict__[_RECORD]]


def added_names(model: nn.Module, by: Surgeon | None = None) -> set[str]:
    """The state-dict names that treatments, or just one of them, added, or whose shapes they changed."""
    owners = {module: name for name, module in unwrap(model).named_modules()}
    names = set()
    for surgeon in surgeons(model) if by is None else [by]:
        for operation in surgeon.operations:
            if isinstance(operation, AddModule | SwapModule):
                prefix = owners[operation.module]
                names |= {f"{prefix}.{key}" for key in operation.module.state_dict()}
    return names


def _refuse_while_paused(model: nn.Module) -> None:
    if any(_PAUSED in module.__dict__ for module in unwrap(model).modules()):
        raise VitfocusError("Inside `untreated` the model's treatments only rest: treat or untreat it outside.")


def _checked(treatment: object) -> Treatment:
    if not isinstance(treatment, Treatment):
        raise VitfocusError(
            f"A treatment is a record such as ContextBroadcasting() or a spec such as 'cb', not {treatment!r}."
        )
    return treatment


def _in_undo_order(record: list[Surgeon]) -> list[Surgeon]:
    """Last first; what was structural was inserted before the others, so it leaves after them."""
    latest = list(reversed(record))
    return sorted(latest, key=lambda surgeon: surgeon.treatment.structural)


def _treated_roots(model: nn.Module) -> list[nn.Module]:
    return [module for module in unwrap(model).modules() if _RECORD in module.__dict__]


def _anatomy_for(model: nn.Module, config: Treatment) -> Anatomy:
    try:
        return anatomy(model)
    except VitfocusError as error:
        raise VitfocusError(f"{config} cannot be applied: {error}") from None


def _forget_compiled_code() -> None:
    """Code that torch.compile made before the surgery does not know of it.

    Nor, left alone, would dynamo tell a treated model from a plain one of its class afterwards and run the code of the
    one for the other: by default it does not guard on hooks, so it is told to.
    """
    import torch._dynamo

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()
