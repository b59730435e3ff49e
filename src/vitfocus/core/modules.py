"""Models and their tensors: temporary eval mode, the logits of any output, and whether weights were trained.

Untrained weights are recognised by their norms, layer scales and biases, which are initialised to constants (biases of
linear layers: within torch's bounds) and change with the first step. A model that was treated after training is marked
with a few values of every parameter: if one of them has changed, the model was trained further.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitfocus.core.errors import VitfocusError

MARK = "_vitfocus_inserted"
#: The attribute of a treated module that holds the treatments in order, each with its record as `treatment`.
TREATED = "_vitfocus_treatments"
#: torch.jit.script calls this attribute of a module, or of one inside it, before it compiles anything.
SCRIPTABLE = "__prepare_scriptable__"
_VALUES = 4  # of each parameter that a mark remembers
_PRECISIONS = (torch.float64, torch.float16, torch.bfloat16)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, DataParallel, DistributedDataParallel or Lightning Fabric's wrapper."""
    if not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise VitfocusError(f"A model is a torch module, not {given}; vitfocus.create_model builds one by its name.")
    for attribute in ("_orig_mod", "module", "_original_module"):
        inner = model._modules.get(attribute)
        if inner is not None and (len(model._modules) == 1 or "_forward_module" in model._modules):
            return unwrap(inner)
    return model


def refuse_script() -> Any:
    """Called by `torch.jit.script` on a treated model."""
    raise VitfocusError(
        "A treated model cannot be compiled by TorchScript, which is deprecated: use torch.compile or torch.export."
    )


_eager_lock, _eager_users, _eager_stance = Lock(), 0, ExitStack()


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Within the context, compiled models run eagerly.

    The state belongs to the process: if two of torch's own contexts overlap without being nested, as they may in
    threads, compiled models would stay eager permanently.
    """
    global _eager_users
    with _eager_lock:
        _eager_users += 1
        if _eager_users == 1:
            _eager_stance.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _eager_lock:
            _eager_users -= 1
            if not _eager_users:
                _eager_stance.close()


@contextmanager
def eval_mode(*models: nn.Module, device: torch.device | None = None) -> Iterator[None]:
    """Within the context, models are in eval mode, and on `device` if given; mode and device are restored afterwards.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with eval_mode(model):
        ...     model.training
        False
        >>> model.training, model[0].training, model[1].training
        (True, True, False)
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    training = [module for module, mode in modes if mode]
    homes = [next((parameter.device for parameter in model.parameters()), device) for model in models]
    try:
        for model in models:
            if device is not None:
                model.to(device)
            if training:
                model.eval()
        yield
    finally:
        for module in training:
            if type(module).train is not nn.Module.train:  # it may discard what it cached in eval mode, as LeViT does
                module.train()
        for module, mode in modes:
            module.training = mode
        if device is not None:
            for model, home in zip(models, homes, strict=True):
                model.to(home)


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: a tensor, a Hugging Face or torchvision output, or a pair of distilled heads.

    Raises:
        VitfocusError: The output holds no logits.

    Example:
        >>> logits_of({"out": torch.zeros(1, 5)}).shape, logits_of((torch.zeros(1, 5), torch.ones(1, 5)))[0, 0]
        (torch.Size([1, 5]), tensor(0.5000))
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, dict) and isinstance(output.get("out"), Tensor):  # torchvision's segmenters
        return output["out"]
    if isinstance(output, tuple | list) and output and all(isinstance(part, Tensor) for part in output):
        return torch.stack(list(output)).mean(0)
    raise VitfocusError(f"The model returns a {type(output).__name__} without logits; a classifier is expected.")


#: Where training scripts put the state dict; averaged weights first, since they are what is reported.
_NESTS = ("state_dict_ema", "model_ema", "state_dict", "model", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def unnest_checkpoint(checkpoint: Mapping[str, Any], names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a training checkpoint, without the prefixes that wrappers add to a model's `names`.

    >>> unnest_checkpoint({"epoch": 3, "state_dict": {"module.head.bias": torch.zeros(2)}}, ["head.bias"])
    {'head.bias': tensor([0., 0.])}
    """
    if not isinstance(checkpoint, Mapping):
        raise VitfocusError(f"A checkpoint is a mapping from names to tensors, not a {type(checkpoint).__name__}.")
    for _ in _NESTS:  # a file may hold a dict that holds itself
        nested = (checkpoint[key] for key in _NESTS if isinstance(checkpoint.get(key), Mapping) and checkpoint[key])
        checkpoint = next(nested, checkpoint)
    tensors = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}

    def added(prefix: str) -> bool:
        return all(name.startswith(prefix) for name in tensors) and not all(name.startswith(prefix) for name in names)

    while tensors and (prefix := next(filter(added, _PREFIXES), None)):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors where needed so that each is contiguous and owns its storage, as safetensors requires.

    Example:
        >>> shared = torch.zeros(4)
        >>> one, two = separate_tensors({"a": shared, "b": shared}).values()
        >>> one.data_ptr() == two.data_ptr()
        False
    """
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in seen or storage.nbytes() > tensor.nbytes
        seen.add(storage.data_ptr())
        result[name] = tensor.clone() if shared else tensor
    return result


def grad_is_recomputed() -> bool:
    """Whether this forward runs inside a backward pass, because gradient checkpointing recomputes a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation over the images of all processes, on any device.

    Statistics and gradients are those of the whole batch, so a run does not depend on the number of processes. A custom
    operator adds the sums, so that a compiled model stays one graph. In a single process it equals `nn.BatchNorm2d`,
    except that a channel with a single value (batch size 1, 1 × 1 map) is normalised by the running statistics, and
    that a forward pass which gradient checkpointing repeats does not change them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, (B, C, H, W)."""
        if isinstance(x, torch.fx.Proxy):  # which the checks of nn.BatchNorm2d do not take
            statistics = (self.running_mean, self.running_var, self.weight, self.bias)
            return F.batch_norm(x, *statistics, self.training, self.momentum or 0.0, self.eps)
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not (self.training and several and torch.distributed.get_world_size() > 1):
            single = x.numel() == x.shape[1]
            if self.training and (single or grad_is_recomputed()):
                statistics = (self.running_mean, self.running_var, self.weight, self.bias)
                return F.batch_norm(x, *statistics, not single, 0.0, self.eps)
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        values = x if x.dtype == torch.float64 else x.float()
        here = values.new_full((1,), x.numel() / x.shape[1])
        sums = sum_over_processes(torch.cat((values.sum((0, 2, 3)), here)))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean[:, None, None]
        variance = sum_over_processes(centred.square().sum((0, 2, 3))) / count
        if not grad_is_recomputed():
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.item()
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


def share_batch_norms(model: nn.Module) -> None:
    """Turn a model's `nn.BatchNorm2d` into `SharedBatchNorm2d`, in place; subclasses stay as they are."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats:
            module.__class__ = SharedBatchNorm2d


@torch.library.custom_op("vitfocus::sum_over_processes", mutates_args=())
def sum_over_processes(values: Tensor) -> Tensor:
    """Sum the values of all processes, on every process; gradients are summed as well."""
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


@sum_over_processes.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _sum_gradients(_: Any, gradient: Tensor) -> Tensor:
    total: Tensor = sum_over_processes(gradient.contiguous())
    return total


sum_over_processes.register_autograd(_sum_gradients)


class SkipInitialisation(TorchFunctionMode):
    """Skips the initialisation of weights, which takes most of the time on the meta device and has no effect there.

    Example:
        >>> with torch.device("meta"), SkipInitialisation():
        ...     nn.Linear(2, 3).weight.shape
        torch.Size([3, 2])
    """

    _SKIPPED = frozenset({"uniform_", "normal_", "fill_", "zero_", "erfinv_", "clamp_", "mul_", "add_", "sub_", "div_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and getattr(func, "__name__", "") in self._SKIPPED:
            return args[0]
        return func(*args, **(kwargs or {}))


def is_trained(model: nn.Module) -> bool:
    """Whether a model's weights differ from an initialisation; False on the meta device, which has no values.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> is_trained(model)
    False
    >>> _ = nn.init.normal_(model[1].weight)
    >>> is_trained(model)
    True
    """
    return any(_has_moved(vector, bound) for vector, bound in _on_host(_vectors(model)))


def mark_inserted(model: nn.Module, specs: Sequence[str]) -> None:
    """Mark these treatments as inserted after the weights were last trained; without specs, remove the mark.

    Earlier marks of the model are kept.
    """
    model = unwrap(model)
    known = [spec for spec in inserted(model) if spec not in specs] if specs else []
    for module in model.modules():
        module.__dict__.pop(MARK, None)
    if specs:
        model.__dict__[MARK] = _Mark((*known, *specs), _sample(model))


def inserted(model: nn.Module) -> tuple[str, ...]:
    """The treatments that were inserted after a model's weights were last trained."""
    marked = [(module, module.__dict__[MARK]) for module in unwrap(model).modules() if MARK in module.__dict__]
    return tuple(spec for module, mark in marked if mark.holds(module) for spec in mark.specs)


def treatment_specs(model: nn.Module) -> tuple[str, ...]:
    """The specs of a model's treatments, in order."""
    return tuple(str(one.treatment) for m in unwrap(model).modules() for one in m.__dict__.get(TREATED, ()))


def insertion_sentence(specs: str, model: str = "") -> str:
    """The sentence shown beside numbers of a model with such treatments; empty if there are none.

    >>> insertion_sentence("cbs")
    'cbs was inserted after the weights were last trained: this measures an insertion, not a method; train it first.'
    """
    if not specs:
        return ""
    of = f" into {model}" if model else ""
    return (
        f"{specs} was inserted{of} after the weights were last trained: this measures an insertion, not a method; "
        "train it first."
    )


def insertions_sentence(sentences: Mapping[str, str]) -> str:
    """One sentence for several models, from the sentence of each by name.

    >>> insertions_sentence({"a": "cbs was inserted into a.", "b": "tap was inserted into b."})
    'a and b carry treatments that were inserted after their weights were last trained: this measures insertions, not \
methods; train them first.'
    """
    if len(sentences) < 2:
        return "".join(sentences.values())
    *first, last = sentences
    return (
        f"{', '.join(first)} and {last} carry treatments that were inserted after their weights were last trained: "
        "this measures insertions, not methods; train them first."
    )


@dataclass(frozen=True)
class _Mark:
    specs: tuple[str, ...]
    values: dict[str, Tensor]

    def holds(self, model: nn.Module) -> bool:
        """Whether every parameter that still exists is unchanged, up to a change of precision."""
        now = _sample(model)
        common = [name for name in self.values if name in now]
        return bool(common) and all(_same(self.values[name], now[name]) for name in common)


def _vectors(model: nn.Module) -> Iterator[tuple[Tensor, float | None]]:
    """Vectors whose values are all equal before training, or at most the number beside them."""
    for module in model.modules():
        # The dicts are read directly: a diagnosis does this for every module, and torch's generators are slow.
        statistics = ((name, buffer) for name, buffer in module._buffers.items() if name.startswith("running_"))
        weight = module._parameters.get("weight")
        for name, value in (*module._parameters.items(), *statistics):
            if value is None or value.ndim != 1 or len(value) < 2 or not _readable(value):
                continue
            if "embed" in name or "token" in name:
                continue  # CLIP's class embedding is a vector that starts at random
            random = name == "bias" and weight is not None and weight.ndim > 1 and _readable(weight)
            yield value.detach(), 1.001 * weight[0].numel() ** -0.5 if random and weight is not None else None


def _on_host(vectors: Iterable[tuple[Tensor, float | None]]) -> Iterator[tuple[Tensor, float | None]]:
    """The same, on the CPU: those of one GPU and dtype are copied together, because each copy waits for the GPU."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, float | None]]] = defaultdict(list)
    for vector, bound in vectors:
        if vector.device.type == "cpu":
            yield vector, bound
        else:
            alike[vector.device, vector.dtype].append((vector, bound))
    for group in alike.values():
        joined = torch.cat([vector for vector, _ in group]).cpu()
        pieces = joined.split([len(vector) for vector, _ in group])
        yield from zip(pieces, (bound for _, bound in group), strict=True)


def _has_moved(vector: Tensor, bound: float | None) -> bool:
    vector = vector.float()
    moved = bool((vector != vector[0]).any())
    return moved and (bound is None or float(vector.abs().max()) > bound)


def _readable(value: Tensor) -> bool:
    return value.is_floating_point() and not value.is_meta and not hasattr(value, "full_tensor")


def _sample(model: nn.Module) -> dict[str, Tensor]:
    sample = {}
    for name, parameter in model.named_parameters():
        if _readable(parameter) and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample[f"{name} {tuple(parameter.shape)}"] = flat[:: -(-len(flat) // _VALUES)].to("cpu", copy=True)
    return sample


def _same(then: Tensor, now: Tensor) -> bool:
    return any(torch.equal(then.to(precision).to(now.dtype), now) for precision in _PRECISIONS)
