"""The Attention Diversification Loss: penalise rows of an attention map that attend to the same tokens.

"Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023), section 3.3. The attention is captured
during the forward pass, which may use fused attention and does not change. The loss of the last training forward is
`auxiliary_loss(model)`, to be added to the loss of the task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy
from vitfocus.attention.capture import ObservedForward, only_reading
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import grad_is_recomputed
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.diversity.with_attention import attention_with_diversity
from vitfocus.kernels.inputs import outside_autocast
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, number_option, option
from vitfocus.treatments.operations import (
    AddHook,
    ForwardContext,
    Override,
    StatefulModule,
    Surgeon,
    track_sequence,
)
from vitfocus.treatments.surgery import handles


@dataclass(frozen=True)
class AttentionDiversification(Treatment):
    """The Attention Diversification Loss (`adl`).

    Each window of windowed attention counts as a map. Padding tokens are excluded.

    Args:
        variant: "official" as in the released code, "paper" as in the equations.
        heads: "mean" averages the maps of the heads first, "each" treats every head's map separately.
        threshold: τ; entries below τ/N are set to zero; 0 keeps all.
        weight: λ, the factor of the loss.
        tokens: "patch" excludes prefix tokens from rows and columns.
        rows: An integer k takes a random subset of k query rows, drawn again for every forward pass.
        layers: The blocks, chosen as for `ContextBroadcasting`.

    Example:
        >>> str(AttentionDiversification(weight=0.5, rows=256))
        'adl(weight=0.5,rows=256)'
    """

    name: ClassVar[str] = "adl"
    label: ClassVar[str] = "ADL"
    colour: ClassVar[int] = 2
    about: ClassVar[str] = "Attention Diversification Loss, in training only, penalises similar rows of a map"

    variant: str = option("official", "official", "paper")
    heads: str = option("mean", "mean", "each")
    threshold: float = number_option(2.0, 0.0)
    weight: float = number_option(1.0, 0.0)
    tokens: str = option("all", "all", "patch")
    rows: int | None = number_option(None, 1)
    layers: Layers = layers_option("upper")

    def preserving(self) -> AttentionDiversification:
        """The treatment itself: a loss does not change the forward pass."""
        return self


class RowChoice:
    """The query rows that a forward pass compares, drawn once per pass for all layers of one size.

    The layer that drew them draws again at every call: gradient checkpointing computes a block a second time with the
    same random state, so the block must consume the same random numbers both times.

    >>> choice = RowChoice()
    >>> rows = choice.of(10, 4, first=1, device=torch.device("cpu"), asker=0)
    >>> len(rows), bool((rows >= 1).all()), choice.of(10, 4, 1, torch.device("cpu"), asker=1) is rows
    (4, True, True)
    """

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int, torch.device], tuple[int, Tensor]] = {}

    def of(self, count: int, rows: int, first: int, device: torch.device, asker: int) -> Tensor:
        """`rows` distinct row numbers out of `count`, starting at `first`, for layer number `asker`."""
        key = (count, first, device)
        if key not in self.drawn or self.drawn[key][0] == asker:
            # argsort of random numbers instead of randperm, because a CUDA graph can replay it.
            self.drawn[key] = (asker, torch.rand(count, dtype=torch.float32, device=device).argsort()[:rows] + first)
        return self.drawn[key][1]

    def reset(self) -> None:
        """Drop the rows of the last pass."""
        self.drawn = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts without rows."""
        return {"drawn": {}}


class DiversityLoss(StatefulModule):
    """Computes the loss of one attention module and stores that of the last training forward."""

    def __init__(
        self,
        config: AttentionDiversification,
        prefix_tokens: int,
        choice: RowChoice,
        number: int,
        context: ForwardContext | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.choice, self.number, self.context = choice, number, context
        self.prefix_tokens = prefix_tokens
        self.loss: Tensor | None = None
        self.expecting = False  # whether a training forward has begun

    def reset(self) -> None:
        """Drop the loss of the last forward pass."""
        self.loss, self.expecting = None, False
        self.choice.reset()

    @property
    def wants_attention(self) -> bool:
        """True only in training mode, so that eval mode has no cost, and not while the model is only read."""
        return self.training and not only_reading()

    def attend(self, seen: Observation, value: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The output of an unmasked attention and its loss, where their gradients are computed at once.

        `whole` (3, B, H, N, D) is what queries, keys and values were unbound from, if that is known.
        """
        first = self._first
        sampled = self.config.rows is not None and self.config.rows < seen.shape[2] - first
        if sampled or (self.context is not None and self.context.valid is not None):
            return None
        if seen.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # the model's attention rounds to bfloat16
            return None
        assert seen.query is not None and seen.key is not None
        with outside_autocast(seen.device):
            tensors = (seen.query, seen.key, value)
            return attention_with_diversity(*tensors, scale=seen.scale, first=first, whole=whole, **self._form)

    def forward(self, seen: Observation) -> None:
        """Record the row similarity of one attention."""
        valid = self.context.valid if self.context is not None else None
        if seen.loss is not None:
            loss = seen.loss
        elif valid is None:
            loss = self._similarity(seen)
        else:
            loss = torch.stack([share * self._similarity(one) for one, share in without_padding(seen, valid)]).sum()
        if not grad_is_recomputed():
            self.loss = loss
        elif loss.requires_grad and self.loss is not None and not self.loss.requires_grad:
            raise VitfocusError(
                "Reentrant gradient checkpointing hides the attention from the diversification loss, whose gradient "
                "would be zero: use use_reentrant=False."
            )

    @property
    def _first(self) -> int:
        """How many tokens are left out."""
        return self.prefix_tokens if self.config.tokens == "patch" else 0

    @property
    def _form(self) -> dict[str, Any]:
        """The form of the loss."""
        return {"variant": self.config.variant, "heads": self.config.heads, "threshold": self.config.threshold}

    def _similarity(self, seen: Observation) -> Tensor:
        config, first, form = self.config, self._first, self._form
        count = seen.shape[2] - first
        rows = None
        if config.rows is not None and config.rows < count:
            rows = self.choice.of(count, config.rows, first, seen.device, self.number)
        with outside_autocast(seen.device):
            if seen.query is not None and seen.key is not None:
                place: Any = {"scale": seen.scale, "bias": seen.bias, "rows": rows, "first": first, "lse": seen.lse}
                return diversity(seen.query, seen.key, **place, **form)
            picked = seen.attention(slice(first, None) if rows is None else rows)
            return row_similarity(picked[..., first:], **form)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle starts without a loss, whose graph cannot be copied."""
        return {**self.__dict__, "loss": None, "expecting": False}


def without_padding(seen: Observation, valid: Tensor) -> list[tuple[Observation, float]]:
    """Split the attention of a padded batch into smaller ones without padding, each with its share of the images.

    `valid` (B, N) is True for tokens that are not padding. Images with the same number of them stay together.

    >>> seen = Observation(map=torch.rand(3, 1, 4, 4))
    >>> valid = torch.tensor([[True, True, True, False], [True] * 4, [False, True, True, True]])
    >>> [(one.shape, round(share, 2)) for one, share in without_padding(seen, valid)]
    [((2, 1, 3, 3), 0.67), ((1, 1, 4, 4), 0.33)]
    """
    valid = valid.expand(seen.shape[0], -1)
    counts = valid.sum(dim=1)
    lengths = sorted({int(count) for count in counts.tolist()} - {0})
    if not lengths or bool(valid.all()):
        return [(seen, 1.0)]
    parts = []
    for length in lengths:
        images = (counts == length).nonzero()[:, 0]
        tokens = valid[images].nonzero()[:, 1].view(len(images), length)
        parts.append((seen.of_tokens(images, tokens), len(images)))
    whole = sum(count for _, count in parts)
    return [(one, count / whole) for one, count in parts]


class ResetLosses:
    """Pre-hook of the stem: drop the losses of the last forward pass when the next one starts."""

    def __init__(self, losses: list[DiversityLoss]) -> None:
        self.losses = losses

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A diagnosis between the forward pass of a training step and its loss, or a checkpoint around the whole model.
        if only_reading() or grad_is_recomputed():
            return
        for loss in self.losses:
            loss.reset()
            loss.expecting = loss.training


def reset_losses(model: nn.Module) -> None:
    """Drop the losses of the last forward pass, and with them its graph, as capturing a CUDA graph requires."""
    for module in model.modules():
        if isinstance(module, StatefulModule):
            module.reset()


@handles(AttentionDiversification)
def insert_diversity(config: AttentionDiversification, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Compute a `DiversityLoss` of the attention of every chosen block."""
    attending = [block for block in anatomy.trunk if block.mixes_tokens_by_attention and block.reader is not None]
    if not attending:
        raise VitfocusError(
            f"{config} compares the rows of token attention, and {type(anatomy.root).__name__} has none "
            f"(its blocks: {anatomy.attention_kinds})."
        )
    if config.tokens == "patch" and anatomy.text is not None:
        raise VitfocusError(
            f"{config} excludes prefix tokens, but {type(anatomy.root).__name__} mixes text with images."
        )
    losses, choice = [], RowChoice()
    context = track_sequence(anatomy, surgeon)
    for number, block in enumerate(choose_blocks(config.layers, attending)):
        assert block.attention is not None and block.reader is not None
        loss = DiversityLoss(config, block.prefix_tokens, choice, number, context)
        surgeon.add(block, "attention.map", "diversity_loss", loss)
        observed = ObservedForward(block.attention, block.reader, loss)
        surgeon.apply(Override(block.attention, "forward", observed.__call__))
        losses.append(loss)
    surgeon.apply(AddHook(anatomy.stem, "input", ResetLosses(losses)))


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the Attention Diversification Loss of the last training forward, times its weight, averaged over layers.

    Args:
        model: Any model.

    Returns:
        A scalar tensor with a gradient; 0 if the model has no such treatment or the last forward was in eval mode.

    Raises:
        VitfocusError: The last forward was in training mode, and no attention was seen in it.

    Example:
        >>> import timm, vitfocus as vf
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).train()
        >>> model = vf.treat_(model, "adl(variant=paper)")
        >>> float(auxiliary_loss(model))
        0.0
        >>> _ = model(torch.randn(1, 3, 32, 32))
        >>> auxiliary_loss(model).requires_grad
        True
    """
    if not isinstance(model, nn.Module):
        raise VitfocusError(f"auxiliary_loss: model is of type {type(model).__name__}; expected a torch.nn.Module.")
    every = [module for module in model.modules() if isinstance(module, DiversityLoss)]
    computed = [(module.config, module.loss) for module in every if module.loss is not None]
    if not computed:
        if unseen := [module for module in every if module.expecting]:
            raise VitfocusError(f"{unseen[0].config} saw no attention in the last forward pass, so there is no loss.")
        placed = next(model.parameters(), None)
        return torch.zeros((), dtype=torch.float32, device=placed.device if placed is not None else None)
    device = computed[0][1].device  # the first device of a model that is spread over several
    total = torch.zeros((), dtype=torch.float32, device=device)
    for config in dict.fromkeys(config for config, _ in computed):
        losses = [loss.to(device) for other, loss in computed if other == config]
        total = total + config.weight * torch.stack(losses).mean()
    return total
