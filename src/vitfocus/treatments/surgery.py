"""Insert treatments into a model in place, remove them again completely, and list where they are.

Existing modules are neither renamed nor rewritten. A treatment is added as a submodule of the block it acts on and is
called by a hook at a port of that block. The model keeps the list of these operations, and each can undo itself. The
support table is computed by inserting each treatment into a model on the meta device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitfocus.anatomy import Anatomy, Family, anatomy, build_example, unwrap
from vitfocus.attention.capture import can_be_read
from vitfocus.core.arguments import checked, conditions, refuse_unused
from vitfocus.core.errors import VitfocusError, warn
from vitfocus.core.modules import MARK, is_trained, mark_inserted
from vitfocus.core.modules import TREATED as _RECORD
from vitfocus.treatments.base import Treatment, all_treatments
from vitfocus.treatments.operations import SetModule, Surgeon
from vitfocus.treatments.spec import is_record, parse_treatments, recorded_treatments, write_record

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


@checked
def treat_(model: Model, *treatments: Treatment | str | Mapping[str, Any]) -> Model:
    """Insert treatments into a model in place.

    If one of them cannot be applied, the model is unchanged. If the weights are trained and a treatment changes what
    the model computes, a `VitfocusWarning` names the form that does not.

    Args:
        model: A vision transformer, or a model that contains exactly one: a task model, a peft model, what
            `torch.compile` returns, your own module. The transformer inside is treated.
        *treatments: Records such as `ContextBroadcasting()`, specs such as "cb(layers=upper)+adl", or a state dict of a
            treated model, which records its treatments, in order.

    Returns:
        The same model.

    Raises:
        VitfocusError: The model is not supported, or a treatment does not fit it.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> model = vf.treat_(model, vf.ContextBroadcasting(variant="scaled"), "tap(branches=2)")
        >>> [str(treatment) for treatment in vf.applied(model)]
        ['cbs', 'tap(branches=2)']
    """
    configs = [config for one in treatments for config in _treatments_in(one)]
    insert_all(model, configs)
    mark_insertion(model, configs)
    return model


def insert_all(model: nn.Module, configs: Sequence[Treatment]) -> None:
    """Like `treat_`, for weights that were trained with these treatments or are loaded afterwards."""
    _refuse_while_paused(model)
    if not configs:
        return
    inside = unwrap(model)
    root = _anatomy_for(inside, configs[0]).root
    treated_before = bool(treated_roots(inside))
    done: list[Surgeon] = []
    try:
        for config in sorted(configs, key=lambda c: not c.structural):
            if treated_before and config.structural:
                raise VitfocusError(f"{config} rebuilds blocks, so it must be applied before any other treatment.")
            surgeon = Surgeon(config)
            done.append(surgeon)
            try:
                refuse_unused(config.given, conditions(type(config)), config)
            except VitfocusError as error:
                raise VitfocusError(f"{config}: {error}") from None
            if type(config) not in _HANDLERS:
                raise VitfocusError(f"{type(config).__name__} has no handler: declare one with @handles.")
            _HANDLERS[type(config)](config, _anatomy_for(inside, config), surgeon)
            _refuse_unreduced(model, surgeon)
    except BaseException:
        for surgeon in reversed(done):
            surgeon.undo()
        raise
    order = {id(config): index for index, config in enumerate(configs)}
    root.__dict__[_RECORD] = [
        *root.__dict__.get(_RECORD, []),
        *sorted(done, key=lambda surgeon: order[id(surgeon.treatment)]),
    ]
    write_record(root, [surgeon.treatment for surgeon in root.__dict__[_RECORD]], inside)
    _forget_compiled_code()


def _refuse_unreduced(model: nn.Module, surgeon: Surgeon) -> None:
    """Refuse parameters that a wrapper around the model would not reduce, because it has counted them already."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        before = "wrapping it in DistributedDataParallel, which counts parameters once"
    elif any(cls.__name__ == "FSDPModule" for module in model.modules() for cls in type(module).__mro__):
        before = "fully_shard, which shards and reduces the parameters that it finds"
    else:
        return
    if any(True for module in surgeon.modules() for _ in module.parameters()):
        raise VitfocusError(f"{surgeon.treatment} adds parameters: treat the model before {before}.")


def mark_insertion(model: nn.Module, configs: Sequence[Treatment]) -> None:
    """Mark a trained model as carrying new treatments, and warn about those that change what it computes."""
    configs = [config for config in configs if not config.training_free]
    if not configs or not is_trained(anatomy(model).root):
        return
    mark_inserted(model, [str(config) for config in configs])
    if changing := [config for config in configs if not config.preserves_function]:
        warn(_change_warning(changing))


def _change_warning(configs: Sequence[Treatment]) -> str:
    """One sentence for treatments that change what trained weights compute, with their better forms."""
    forms = {str(config): config.preserving() for config in configs}
    better = "+".join(str(form) for form in forms.values() if form is not None)
    without = "+".join(spec for spec, form in forms.items() if form is None)
    verb = "changes" if len(configs) == 1 else "change"
    change = f"{'+'.join(forms)} {verb} what these trained weights compute"
    if not better:
        return f"{change} and no form of {without} starts as the identity: train on before you use the model."
    other = f" (no form of {without} does)" if without else ""
    return f"{change}: use {better}, which starts as the identity{other}, or train further."


@checked
def untreat_(model: Model) -> Model:
    """Remove every treatment from a model in place.

    Outputs and state-dict names are those of the original model, bit for bit; its weights keep any training that
    happened in the meantime.

    Args:
        model: A treated model; one without treatments is not changed.

    Returns:
        The same model.

    Raises:
        VitfocusError: The call is inside a `with untreated(model)` block.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "cb")
        >>> vf.applied(vf.untreat_(model))
        []
    """
    _refuse_while_paused(model)
    for root in treated_roots(model):
        _undo(root, model)
    mark_inserted(model, ())
    _forget_compiled_code()
    return model


@checked
@contextmanager
def untreated(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager that removes the treatments of a model and inserts them again on exit.

    Args:
        model: A treated model.

    Yields:
        The same model, without its treatments.

    Raises:
        VitfocusError: `model` is not a torch module.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "cbs")
        >>> with vf.untreated(model):
        ...     print(any("context" in name for name in model.state_dict()))
        False
    """
    roots = [(root, _undo(root, model), root.__dict__.pop(MARK, None)) for root in treated_roots(model)]
    for root, *_ in roots:
        root.__dict__[_PAUSED] = True
    _forget_compiled_code()
    try:
        yield model
    finally:
        for root, record, mark in roots:
            for surgeon in reversed(_in_undo_order(record)):
                surgeon.redo()
            root.__dict__[_RECORD] = record
            write_record(root, [surgeon.treatment for surgeon in record], model)
            root.__dict__ |= {MARK: mark} if mark is not None else {}
            del root.__dict__[_PAUSED]
        _forget_compiled_code()


@checked
def applied(model: nn.Module) -> list[Treatment]:
    """List the treatments of a model, in the order in which they were applied.

    Args:
        model: Any model.

    Returns:
        The records; an empty list for a model without treatments.

    Raises:
        VitfocusError: `model` is not a torch module.

    Example:
        >>> import timm, vitfocus as vf
        >>> vf.applied(vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=1), "adl"))[0].threshold
        2.0
    """
    return [surgeon.treatment for surgeon in surgeons(model)]


def surgeons(model: nn.Module) -> list[Surgeon]:
    """The surgeons that inserted a model's treatments, in the order of the treatments."""
    return [surgeon for root in treated_roots(model) for surgeon in root.__dict__[_RECORD]]


def added_names(model: nn.Module, by: Surgeon | None = None) -> set[str]:
    """The state-dict names that all treatments, or one of them, added or changed in shape; with all, the record too."""
    owners = {module: name for name, module in unwrap(model).named_modules()}
    names = set()
    for surgeon in surgeons(model) if by is None else [by]:
        for operation in surgeon.operations:
            if isinstance(operation, SetModule):
                prefix = owners[operation.current]
                names |= {f"{prefix}.{key}" for key in operation.current.state_dict()}
    return names | ({name for name in unwrap(model).state_dict() if is_record(name)} if by is None else set())


def _refuse_while_paused(model: nn.Module) -> None:
    if any(_PAUSED in module.__dict__ for module in unwrap(model).modules()):
        raise VitfocusError("Inside `untreated` a model cannot be treated or untreated: do it outside.")


def _treatments_in(given: Treatment | str | Mapping[str, Any]) -> list[Treatment]:
    if isinstance(given, Mapping):
        if not all(isinstance(name, str) for name in given):
            raise VitfocusError("treat_ takes treatments, specs, or a state dict, whose keys are names of tensors.")
        if found := recorded_treatments(given, "the state dict"):
            return found
        raise VitfocusError("The state dict records no treatment: it is that of a plain model.")
    if isinstance(given, str) and not given.strip():
        raise VitfocusError(f"{given!r} names no treatment: write one, such as cb, or leave it out.")
    return parse_treatments(given) if isinstance(given, str) else [given]


def _undo(root: nn.Module, model: nn.Module) -> list[Surgeon]:
    """Remove the treatments of a transformer in a model; returns the surgeons that inserted them."""
    record: list[Surgeon] = root.__dict__.pop(_RECORD)
    for surgeon in _in_undo_order(record):
        surgeon.undo()
    write_record(root, (), model)
    return record


def _in_undo_order(record: list[Surgeon]) -> list[Surgeon]:
    """Last first; structural treatments were inserted before the others and are removed after them."""
    latest = list(reversed(record))
    return sorted(latest, key=lambda surgeon: surgeon.treatment.structural)


def treated_roots(model: nn.Module) -> list[nn.Module]:
    """The transformers in a model that have treatments."""
    return [module for module in unwrap(model).modules() if _RECORD in module.__dict__]


def _anatomy_for(model: nn.Module, config: Treatment) -> Anatomy:
    try:
        seen = anatomy(model)
    except VitfocusError as error:
        raise VitfocusError(f"{config} cannot be applied: {error}") from None
    if not seen.trunk:
        raise VitfocusError(f"{config} treats blocks of image tokens, and {type(seen.root).__name__} has none.")
    return seen


def _forget_compiled_code() -> None:
    """Discard what torch.compile compiled before the surgery, and make dynamo guard on hooks.

    By default dynamo does not guard on hooks, so it could run the code of a plain model for a treated one of the same
    class, or the reverse.
    """
    import torch._dynamo

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


@dataclass(frozen=True)
class Placement:
    """One treatment at one place of one block.

    `place` is a port's name ("mlp.end"), "attention.map" (it reads the attention), "attention" or "mlp" (it replaces
    that part), or "block.end".
    """

    treatment: Treatment
    block: str
    place: str


def placements(model: nn.Module) -> list[Placement]:
    """Every place at which a treatment acts, in order of the treatments and then of depth.

    >>> import timm, vitfocus as vf
    >>> model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=2), "cb(layers=[1])+adl(layers=[0])")
    >>> [(p.treatment.name, p.block, p.place) for p in placements(model)]
    [('cb', 'blocks.1', 'mlp.end'), ('adl', 'blocks.0', 'attention.map')]
    """
    records = surgeons(model)
    names = {block.depth: block.name for block in anatomy(unwrap(model))} if records else {}
    return [
        Placement(surgeon.treatment, names[depth], place)
        for surgeon in records
        for depth, place in surgeon.places
        if depth in names  # blocks may have been pruned since
    ]


def columns() -> dict[str, str]:
    """The columns of the support table: heading and the spec that is tried."""
    return {heading: spec for kind in all_treatments() for heading, spec in kind.columns.items()}


def support(family: Family) -> dict[str, Any]:
    """One row of the support table: library, family, kinds of attention, and for each spec whether it can be applied.

    A family whose library is not installed has None everywhere.
    """
    row: dict[str, Any] = {"library": family.library, "family": family.name, "attention": []}
    model = build_example(family)
    return row | {"treatments": dict.fromkeys(columns().values())} if model is None else row | support_of(model)


def support_of(model: nn.Module, specs: Iterable[str] | None = None) -> dict[str, Any]:
    """How a model was dissected, whether its attention can be read, and for each spec whether it can be applied.

    `reasons` has a sentence for the reading and for every spec that is refused.
    """
    body = anatomy(model)
    readable = [block for block in body if can_be_read(block)]
    tried = {spec: _refusal(model, spec) for spec in (columns().values() if specs is None else specs)}
    reasons = {spec: why for spec, why in tried.items() if why is not None}
    if not readable:
        kinds = ", ".join(sorted({block.attention_kind for block in body}))
        reasons["reading"] = f"No layer has a softmax over scores of tokens (its blocks: {kinds})."
    return {
        "attention": sorted({block.attention_kind for block in body}),
        "found_by": body.found_by,
        "confidence": body.confidence,
        "reading": bool(readable),
        "treatments": {spec: why is None for spec, why in tried.items()},
        "reasons": reasons,
    }


def _refusal(model: nn.Module, spec: str) -> str | None:
    """Why a treatment cannot be applied to a model; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            untreat_(treat_(model, spec))
        except VitfocusError as error:
            return str(error)
    return None
