"""timm's optimiser with timm's groups, a batched Muon, and the learning rate of each step in closed form.

timm's Muon orthogonalises one matrix at a time. A ViT has a dozen matrices of each shape, each too small to fill a GPU,
so `BatchedMuon` iterates on all matrices of one shape together, and a fused AdamW updates the vectors. Everything but
the order of the work is timm's.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import to_builtins
from msgspec.structs import replace
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.optim.muon import (
    _COEFFICIENTS,
    Muon,
    _is_suitable_for_muon,
    get_lr_scale,
    resolve_ns_coefficients,
    zeropower_via_newtonschulz,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from vitfocus.anatomy import anatomy
from vitfocus.core.errors import VitfocusError, nearest, reason
from vitfocus.recipes import Optimiser, Recipe
from vitfocus.train.checkpoint import gather_tensors
from vitfocus.treatments.surgery import added_names


class BatchedMuon(Muon):
    """timm's `Muon`: same arguments, groups and state. What cannot be batched is left to timm.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> optimiser = BatchedMuon(layers.parameters(), lr=1e-3)
        >>> layers(torch.ones(1, 8)).sum().backward()
        >>> optimiser.step()
        >>> sorted(optimiser.state[layers[0].weight])
        ['momentum_buffer', 'use_muon']
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: list[tuple[Tensor, Tensor | None]] = []
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if group["algo"] == "muon" and group["conv_mode"] == "flatten":
                matrices = [p for p in given if self._is_matrix(p, group)]
                self._update(matrices, group)
                updated += [(p, p.grad) for p in matrices]
            if not group["nesterov"]:  # timm then uses NAdamW, which has no fused form
                vectors = [p for p in given if not self._is_matrix(p, group)]
                self._update_vectors(vectors, group)
                updated += [(p, p.grad) for p in vectors]
        for parameter, _ in updated:  # timm's step skips parameters without a gradient
            parameter.grad = None
        super().step()
        for parameter, gradient in updated:
            parameter.grad = gradient
        return loss

    def _is_matrix(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether Muon updates the parameter, by timm's rules; AdamW updates the others."""
        state = self.state[parameter]
        if "use_muon" not in state:
            asked = not group.get("use_fallback", False) and group.get("use_muon", True)
            state["use_muon"] = bool(asked and _is_suitable_for_muon(parameter))
        return bool(state["use_muon"])

    def _update_vectors(self, vectors: list[Tensor], group: dict[str, Any]) -> None:
        if not vectors:
            return
        for parameter in vectors:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] = state["step"].to(parameter.device)
        steps = [self.state[parameter]["step"] for parameter in vectors]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            vectors,
            [parameter.grad for parameter in vectors if parameter.grad is not None],
            [self.state[parameter]["exp_avg"] for parameter in vectors],
            [self.state[parameter]["exp_avg_sq"] for parameter in vectors],
            [],
            steps,
            lr=group["lr"] * group["fallback_lr_scale"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        if not matrices:
            return
        for parameter in matrices:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        gradients = [parameter.grad for parameter in matrices if parameter.grad is not None]
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in matrices]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, parameter in enumerate(matrices):
            by_shape[(parameter.shape[0], parameter.shape[1:].numel())].append(index)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        for shape, indices in by_shape.items():
            orthogonal = zeropower_via_newtonschulz(
                torch.stack([directions[index].reshape(shape) for index in indices]),
                group["ns_steps"],
                resolve_ns_coefficients(group["ns_coefficients"], _COEFFICIENTS),
                eps=group["eps"],
                safety_factor=group["safety_factor"],
                scale_eps=group["scale_eps"],
            )
            scale = get_lr_scale(torch.Size(shape), group["adjust_lr_fn"]) if group["adjust_lr_fn"] else 1.0
            # Tall matrices come back transposed; lying as the parameters do, all are added in one launch.
            change = orthogonal.to(matrices[indices[0]].dtype, memory_format=torch.contiguous_format)
            change *= -group["lr"] * scale
            parameters = [matrices[index] for index in indices]
            torch._foreach_add_(parameters, [part.view_as(p) for part, p in zip(change, parameters, strict=True)])


def create_optimiser(
    model: nn.Module, section: Optimiser, device: torch.device, heads: Collection[str] = ()
) -> Optimizer:
    """The optimiser of the trained parameters; those named in `heads` have `section.head_lr` times the rate."""
    known = [str(name) for name in list_optimizers()]
    if section.name not in known:
        raise VitfocusError(f"timm has no optimiser {section.name!r}: {nearest(section.name, known)}")
    by_timm = hasattr(model, "group_matcher")
    try:
        optimiser = _create(model, section if by_timm else replace(section, layer_decay=0.0), device)
    except (TypeError, ValueError, AssertionError, ImportError) as error:  # some need a GPU or a package
        raise VitfocusError(f"The optimiser {section.name} cannot be built: {reason(error)}.") from None
    _try(section, device)
    if section.layer_decay and not by_timm:
        _scale_groups(optimiser, _layer_decay_scales(model, section.layer_decay))
    if section.head_lr != 1.0:
        _scale_groups(optimiser, {id(p): section.head_lr for name, p in model.named_parameters() if name in heads})
    return optimiser


def _create(model: nn.Module, section: Optimiser, device: torch.device) -> Optimizer:
    more: dict[str, Any] = {}
    if section.name in ("adam", "adamw"):
        more["fused"] = device.type == "cuda"
    if section.name not in ("sgd", "momentum"):
        more["eps"] = section.eps
        if get_optimizer_info(section.name).num_betas == 2:  # Adan has three, and its own values
            more["betas"] = section.betas
    optimiser: Optimizer = create_optimizer_v2(
        model,
        opt=section.name,
        lr=section.lr,
        weight_decay=section.weight_decay,
        layer_decay=section.layer_decay or None,
        **more,
    )
    if type(optimiser) is Muon and device.type == "cuda":  # on a CPU, one matrix after the other is as fast
        optimiser.__class__ = BatchedMuon
    return optimiser


def _try(section: Optimiser, device: torch.device) -> None:
    """Take a step on a tiny model and gather its state, so that an unsuitable optimiser fails before training."""
    with torch.random.fork_rng(devices=[]):
        small = nn.Linear(2, 2).to(device)
    try:
        optimiser = _create(small, replace(section, layer_decay=0.0), device)
        small(torch.ones(1, 2, device=device)).sum().backward()
        optimiser.step()
        json.dumps(to_builtins(gather_tensors(small, optimiser)[1]))
    except Exception as error:  # optimisers raise errors of any type
        raise VitfocusError(
            f"The optimiser {section.name} cannot train here, where a step is one backward pass and a checkpoint holds "
            f"tensors and plain values: {reason(error)}."
        ) from None


def _layer_decay_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """The factor of every parameter, by the depth of its block, for a model that is not timm's.

    Parameters before the first block form a separate layer; those after the last one have the full rate.
    """
    try:
        blocks = [block.host for block in anatomy(model)]
    except VitfocusError:
        raise VitfocusError(
            f"optimiser.layer_decay needs the layers of {type(model).__name__}, which is neither a timm model nor a "
            "vision transformer that vitfocus supports: leave it out."
        ) from None
    depth = {id(p): number for number, block in enumerate(blocks, start=1) for p in block.parameters()}
    order = [id(parameter) for parameter in model.parameters()]
    last = max((place for place, name in enumerate(order) if name in depth), default=-1)
    scales, layer = {}, 0
    for place, name in enumerate(order):  # parameters between two blocks belong to the one before
        layer = depth.get(name, layer) if place <= last else len(blocks) + 1
        scales[name] = decay ** (len(blocks) + 1 - layer)
    return scales


def _scale_groups(optimiser: Optimizer, scales: Mapping[int, float]) -> None:
    """Split every group by the factor of its parameters, 1 by default, which `set_learning_rate` reads."""
    groups = []
    for group in optimiser.param_groups:
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
        for scale, some in parts.items():
            groups.append({**group, "params": some, "lr_scale": group.get("lr_scale", 1.0) * scale})
    optimiser.param_groups[:] = groups


def freeze_parameters(model: nn.Module, what: str, heads: Collection[str]) -> list[nn.Module]:
    """Freeze the parameters that are not trained, and return the batch normalisations that must stay in eval mode.

    `what` is "all", "added" (the parameters of treatments) or "head" (those, and the parameters named in `heads`).
    """
    if what == "all":
        return []
    trained = added_names(model)
    if what == "head":
        trained |= set(heads)
    names = [name for name, _ in model.named_parameters()]
    if not any(name in trained for name in names):
        raise VitfocusError(f"optimiser.train={what} leaves nothing to train: the treatments have no parameters.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return [norm for norm in _batch_norms(model) if not any(p.requires_grad for p in norm.parameters())]


def trained_batch_norms(model: nn.Module, frozen: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The batch normalisations that are trained, by which images of a batch depend on each other."""
    return [norm for norm in _batch_norms(model) if not any(norm is one for one in frozen)]


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@dataclass(frozen=True)
class TrainingSchedule:
    """How many steps a run has, where its epochs end, and its learning rate at each step."""

    steps: int
    images: int
    steps_per_epoch: float
    warmup: int
    lr: float
    warmup_lr: float
    min_lr: float
    decay: str = "cosine"
    power: float = 1.0
    drops: tuple[float, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, images: int) -> TrainingSchedule:
        """The schedule of a recipe for a number of training images."""
        per_epoch = images / recipe.data.batch
        optimiser, schedule = recipe.optimiser, recipe.schedule
        steps = schedule.steps or max(1, math.ceil(schedule.epochs * per_epoch - 1e-9))
        scale = recipe.data.batch / optimiser.lr_batch if optimiser.lr_batch else 1.0
        by_epochs = 0 if schedule.steps else round(schedule.warmup_epochs * per_epoch)
        warmup = min(steps, schedule.warmup_steps or by_epochs)
        rates = (optimiser.lr * scale, schedule.warmup_lr, schedule.min_lr)
        return cls(steps, images, per_epoch, warmup, *rates, schedule.decay, schedule.power, schedule.drops)

    def learning_rate(self, step: int) -> float:
        """Linear from warmup_lr up to lr, then down: half a cosine or a line to min_lr after the warm-up, a power of
        the share of the run that is left (counted from the first step, as is usual in segmentation), or divided by ten
        at each drop.

        >>> schedule = TrainingSchedule(
        ...     steps=110, images=160, steps_per_epoch=10, warmup=10, lr=1.0, warmup_lr=0.0, min_lr=0.0
        ... )
        >>> [round(schedule.learning_rate(step), 3) for step in (0, 5, 10, 60)]
        [0.0, 0.5, 1.0, 0.5]
        """
        low, high = min(self.min_lr, self.lr), self.lr
        if self.decay == "polynomial":
            high = low + (self.lr - low) * (1 - step / self.steps) ** self.power
        elif self.decay == "drops":
            high = max(low, self.lr * 0.1 ** sum(step >= share * self.steps for share in self.drops))
        if step < self.warmup:
            return self.warmup_lr + (high - self.warmup_lr) * step / self.warmup
        if self.decay in ("polynomial", "drops"):
            return high
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return low + (self.lr - low) * left

    def epoch(self, step: int) -> float:
        """The number of epochs after a number of steps."""
        return step / self.steps_per_epoch

    def ends_epoch(self, step: int) -> int:
        """The number of the epoch that this step completes, or 0."""
        before, after = math.floor(self.epoch(step) + 1e-9), math.floor(self.epoch(step + 1) + 1e-9)
        return after if after > before else 0


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """Set the rate of every group; layer-wise decay is a factor that timm keeps as `lr_scale`."""
    for group in optimiser.param_groups:
        value = rate * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # which a captured step reads
            group["lr"].fill_(value)
        else:
            group["lr"] = value
