"""σReparam: weights divided by their spectral norm and scaled by one learned number, against entropy collapse.

"Stabilizing Transformer Training by Preventing Attention Entropy Collapse" (Zhai et al., ICML 2023). The linear layers
of a block compute with Ŵ = (γ / σ(W)) W. σ(W), the greatest singular value, is estimated by one step of power iteration
per training forward: u = Wv / |Wv|, v = Wᵀu / |Wᵀu|, σ = uᵀWv, whose gradient flows through W. The stored weights keep
their names and values; the attribute that the layer reads is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from vitfocus.anatomy import Anatomy, Block
from vitfocus.attention.capture import only_reading
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import grad_is_recomputed
from vitfocus.kernels.inputs import outside_autocast
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, option
from vitfocus.treatments.operations import AddHook, Surgeon
from vitfocus.treatments.surgery import handles

#: Initial steps of power iteration, as in the spectral norm of torch.
_FIRST_STEPS = 15
_SCALE = "_vitfocus_spectral_scale"


@dataclass(frozen=True)
class SigmaReparam(Treatment):
    """Spectrally normalised linear layers (`sigma`), for training.

    Args:
        site: The linear layers of "both" halves of a block, of the "attention" or of the "mlp".
        init: γ starts at 1, as in the paper; "spectral" starts it at σ(W), so that trained weights keep their output.
        layers: The blocks, chosen as for `ContextBroadcasting`.

    Example:
        >>> str(SigmaReparam(site="attention"))
        'sigma(site=attention)'
    """

    name: ClassVar[str] = "sigma"
    label: ClassVar[str] = "σ"
    about: ClassVar[str] = "σReparam divides weights by their spectral norm and learns their scale"

    site: str = option("both", "both", "attention", "mlp")
    init: str = option("default", "default", "spectral")
    layers: Layers = layers_option("upper")

    def preserving(self) -> SigmaReparam:
        """γ = σ(W)."""
        return replace(self, init="spectral")


class SpectralScale(nn.Module):
    """γ and the first singular vectors of one weight matrix, which is given with every call.

    >>> weight = torch.diag(torch.tensor([3.0, 1.0]))
    >>> scale = SpectralScale(weight, spectral=False)
    >>> round(scale(weight).item(), 4)
    0.3333
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Tensor, spectral: bool) -> None:
        super().__init__()
        self.spectral = spectral
        self.gain = nn.Parameter(torch.ones(1, device=weight.device))  # FSDP2 does not take scalars
        for name, length in zip(("left", "right"), weight.shape, strict=True):
            self.register_buffer(name, torch.ones(length, device=weight.device))
        self.start(weight)

    def forward(self, weight: Tensor) -> Tensor:
        """γ / σ(W)."""
        with outside_autocast(weight.device):
            left, right = self.left.float().clone(), self.right.float().clone()  # a step changes them before backward
            return self.gain / torch.dot(left, weight.float() @ right)

    @torch.no_grad()
    def start(self, weight: Tensor) -> None:
        """Estimate σ from a random vector, and set γ."""
        random = torch.Generator().manual_seed(0)  # the global random state must not change
        self.right.copy_(torch.randn(len(self.right), generator=random, device="cpu"))
        for _ in range(_FIRST_STEPS):
            self.step(weight)
        self.gain.fill_(1.0)
        self.gain.div_(self(weight) if self.spectral else 1.0)

    @torch.no_grad()
    def step(self, weight: Tensor) -> None:
        """One step of power iteration."""
        with outside_autocast(weight.device):
            weight = weight.float()
            left = F.normalize(weight @ self.right.float(), dim=0)
            self.left.copy_(left)
            self.right.copy_(F.normalize(weight.mT @ left, dim=0))


def stored_weight(module: nn.Module) -> Tensor:
    """The matrix of a layer as it is stored, rescaled or not."""
    weight: Any = module._parameters["in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"]
    if hasattr(weight, "full_tensor"):
        raise VitfocusError("sigma reads whole weights: treat the model before its blocks are sharded with FSDP2.")
    return weight


def _scaled(module: nn.Module) -> Tensor:
    """Ŵ; the stored matrix while it is sharded (FSDP2 looks it up then) or only partly loaded (`from_pretrained`)."""
    scales: SpectralScale = module.__dict__[_SCALE]
    try:
        weight = stored_weight(module)
    except VitfocusError:
        weight = None
    if weight is None or weight.is_meta != scales.left.is_meta:
        raise AttributeError("weight")  # so that torch returns the parameter
    scale: Tensor = scales(weight)
    if isinstance(scale, torch.fx.Proxy):  # whose graph would read the rescaled weight as the stored one
        raise VitfocusError("torch.fx cannot trace layers that rescale their weight: use torch.export.")
    return weight * scale.to(weight.dtype)


class SpectralLinear(nn.Linear):
    """The new class of a linear layer: its stored weight is unchanged, and the weight it reads is the scaled one."""

    weight = property(_scaled)


class SpectralMultihead(nn.MultiheadAttention):
    """The same for the joint projection of an `nn.MultiheadAttention`."""

    in_proj_weight = property(_scaled)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: SpectralLinear, nn.MultiheadAttention: SpectralMultihead}
_CLASSES[NonDynamicallyQuantizableLinear] = SpectralLinear


@dataclass(eq=False)
class Rescale:
    """The operation that makes a layer read its weight through a scale."""

    module: nn.Module
    scale: SpectralScale
    original: type[nn.Module]

    def apply(self) -> None:
        """Change the class of the layer."""
        self.module.__dict__[_SCALE] = self.scale
        self.module.__class__ = _CLASSES[self.original]

    def revert(self) -> None:
        """Restore its class."""
        self.module.__class__ = self.original
        del self.module.__dict__[_SCALE]


class BlockScales(nn.ModuleList):
    """The inserted module: the scales of a block's layers, by number; transformers renames what sounds like layers."""

    def __init__(self, layers: Iterable[nn.Module], spectral: bool) -> None:
        scales = [(one, SpectralScale(stored_weight(one).detach(), spectral)) for one in layers]
        super().__init__(scale for _, scale in scales)
        self.rescaled = [Rescale(one, scale, type(one)) for one, scale in scales]

    def step(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A pre-hook of the block: in training, one step of power iteration for each matrix that is not frozen."""
        for one in self.rescaled:
            weight = stored_weight(one.module)
            if module.training and weight.requires_grad and not grad_is_recomputed() and not only_reading():
                one.scale.step(weight)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """After a plain checkpoint, start again: added modules are a block's last, so its weights are loaded by now."""
        if not any(name.startswith(prefix) for name in state):
            for one in self.rescaled:
                one.scale.start(stored_weight(one.module))
        super()._load_from_state_dict(state, prefix, *rest)


@handles(SigmaReparam)
def insert_scales(config: SigmaReparam, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Rescale the linear layers of every chosen block."""
    layers = {block: found for block in anatomy.trunk if (found := dict.fromkeys(_linear_layers(block, config.site)))}
    if not layers:
        raise VitfocusError(f"{config} rescales linear layers, and {type(anatomy.root).__name__} has none there.")
    for block in choose_blocks(config.layers, list(layers)):
        scales = BlockScales(layers[block], config.init == "spectral")
        surgeon.add(block, "attention", "spectral_scales", scales)
        for one in scales.rescaled:
            surgeon.apply(one)
        surgeon.apply(AddHook(block.host, "input", scales.step))


def _linear_layers(block: Block, site: str) -> Iterator[nn.Module]:
    """The layers of the attention and MLP of a block that have a matrix, without those of treatments."""
    for half, part in (("attention", block.attention), ("mlp", block.mlp)):
        ends = [port.module for place, port in block.ports.items() if place.startswith(f"{half}.")]
        for outer in (part, *ends) if site in ("both", half) else ():
            inner = _untreated_modules(outer) if outer is not None else ()
            yield from (one for one in inner if type(one) in _CLASSES and stored_weight(one) is not None)


def _untreated_modules(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not type(child).__module__.startswith("vitfocus.treatments."):
            yield from _untreated_modules(child)
