"""Token-aware Average Pooling: each token chooses how large a neighbourhood to average before attention.

"Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023), section 3.2. A small predictor gives
each token K weights, softmax(conv3×3(BN(conv3×3(x)))), and the token becomes Σ_k w_k · pool_k(x), where branch 0 is
the token itself and branch k a 3×3 mean with dilation k (or, as the paper's variant, a (2k+1)² mean). It comes before
the norm before attention; the shortcut keeps the un-pooled tokens. The fixed poolings and convolutions of the paper's
Table 1 are here as baselines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from vitfocus.anatomy import Anatomy, Block, GridRule
from vitfocus.core.arguments import only_with
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import SharedBatchNorm2d, grad_is_recomputed
from vitfocus.kernels.backends import chosen, exporting
from vitfocus.kernels.pooling.op import (
    MOST_PATCHES,
    mix_by_matrix,
    mix_dilated,
    pool_tokens,
    predict_by_product,
    predict_hidden,
    track,
)
from vitfocus.kernels.pooling.reference import box_mean, dilated_mean, mix_poolings
from vitfocus.treatments.base import Layers, Treatment, choose_blocks, layers_option, number_option, option
from vitfocus.treatments.operations import ForwardContext, Surgeon, track_image_size
from vitfocus.treatments.surgery import handles

#: The kernel unrolls its branches; more of them than the paper tried use plain PyTorch.
MOST_BRANCHES = 8

#: The modes that mix branches by predicted weights, and those that learn something.
_MIXING = ("dilation", "kernel")
_LEARNED = (*_MIXING, "conv3", "conv5")

#: The margin of the identity branch's logit with `near_identity`: the other branches get e⁻¹² ≈ 6e-6 of its weight.
_IDENTITY_MARGIN = 12.0


@dataclass(frozen=True)
class TokenAwarePooling(Treatment):
    """Token-aware Average Pooling (`tap`).

    Args:
        mode: "dilation" is the method, "kernel" its multi-kernel variant; "average3", "average5", "conv3" and "conv5"
            are the fixed baselines of Table 1.
        branches: K, the number of branches of "dilation" and "kernel".
        layers: "all", "shallow" (the first 30 %), "deep" (the rest), "inner" (not the blocks that feed a feature
            pyramid), a list of block numbers, or several of these joined by "&".
        init: "near_identity" puts almost all weight on the token itself at first, which keeps the output of trained
            weights; not for the averages.

    Example:
        >>> str(TokenAwarePooling(branches=2, layers=[0, 1]))
        'tap(branches=2,layers=[0,1])'
    """

    name: ClassVar[str] = "tap"
    label: ClassVar[str] = "TAP"
    colour: ClassVar[int] = 1
    about: ClassVar[str] = "Token-aware Average Pooling averages each token's neighbourhood before attention"

    mode: str = option("dilation", "dilation", "kernel", "average3", "average5", "conv3", "conv5")
    branches: Annotated[int, only_with("mode", *_MIXING)] = number_option(4, 1, 64)
    layers: Layers = layers_option("shallow", "deep")
    init: Annotated[str, only_with("mode", *_LEARNED)] = option("default", "default", "near_identity")

    def preserving(self) -> TokenAwarePooling:
        """The form that starts near the identity; fixed averages have none, so the method itself is suggested."""
        if self.mode not in _LEARNED:
            return TokenAwarePooling(layers=self.layers, init="near_identity")
        alone = self.mode in _MIXING and self.branches == 1
        return self if alone else replace(self, init="near_identity")

    @property
    def operations_per_element(self) -> int:
        """K - 1 means and K weighted terms for a mixture, one for a fixed mean."""
        return 2 * self.branches - 1 if self.mode in _MIXING else int(self.mode.startswith("average"))


class TokenPooling(nn.Module):
    """Base class of the inserted modules: reshapes tokens to (B, C, H, W), pools, and reshapes them back.

    Prefix tokens are left unchanged. The grid follows from the size of the image that entered the model.
    """

    def __init__(self, layout: str, prefix_tokens: int, rule: GridRule, context: ForwardContext | None) -> None:
        super().__init__()
        self.layout = layout
        self.prefix_tokens = prefix_tokens
        self.rule = rule
        self.context = context

    def pool(self, image: Tensor) -> Tensor:
        """(B, C, H, W) to the same."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, C), (B, H, W, C) or (B, C, H, W), in the layout of the port; the shape is kept."""
        if self.layout == "BCHW":
            return self.pool(tokens)
        if self.layout == "BHWC":
            return self.pool(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        prefix, patches = tokens[:, : self.prefix_tokens], tokens[:, self.prefix_tokens :]
        rows, columns = self._grid(patches.shape[1])
        image = patches.transpose(1, 2).unflatten(2, (rows, columns))
        pooled = self.pool(image).flatten(2).transpose(1, 2)
        return torch.cat((prefix, pooled), dim=1) if self.prefix_tokens else pooled

    def _grid(self, count: int) -> tuple[int, int]:
        if self.context is None or self.context.image_size is None:
            raise VitfocusError(
                "Token-aware Average Pooling was given tokens without an image, so it does not know the grid."
            )
        rows, columns = self.rule(self.context.image_size)
        if isinstance(count, torch.fx.Proxy):
            if not isinstance(rows, torch.fx.Proxy):
                raise VitfocusError("torch.fx does not trace the stem of this model, so the grid is not known.")
        elif rows * columns != count:
            raise VitfocusError(
                f"Token-aware Average Pooling needs all {rows}×{columns} patch tokens of the image and was given "
                f"{count}: it does not work in models that drop tokens."
            )
        return rows, columns


class DilationPredictor(TokenPooling):
    """K poolings mixed by weights that each token predicts; parameters are named and shaped as published.

    >>> predictor = DilationPredictor(TokenAwarePooling(), 8, "BCHW", 0, GridRule(()), None)
    >>> predictor(torch.randn(2, 8, 5, 7)).shape, sum(p.numel() for p in predictor.parameters())
    (torch.Size([2, 8, 5, 7]), 440)
    """

    def __init__(self, config: TokenAwarePooling, width: int, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        count = self.branches = config.branches
        self.dilated = config.mode == "dilation"
        self.proj = nn.Sequential(
            nn.Conv2d(width, count, 3, padding=1, bias=False),
            SharedBatchNorm2d(count),
            nn.Conv2d(count, count, 3, padding=1, bias=False),
        )
        if config.init == "near_identity":
            self._start_near_identity(count)

    def forward(self, tokens: Tensor) -> Tensor:
        """Channels-last tokens are pooled without reshaping them, by the kernel or by a matrix."""
        first, norm, second = self.proj
        if not self.dilated or self.layout == "BCHW" or exporting():
            return super().forward(tokens)
        if not _is_convolution(first) or not _is_convolution(second) or _is_hooked(self.proj):
            return super().forward(tokens)
        by_kernel = fits_kernel(tokens, self.layout, self.branches)
        if not by_kernel and (chosen(tokens) == "reference" or tokens.device.type != "cpu"):
            return super().forward(tokens)
        if self.layout == "BHWC":
            _, rows, columns, width = tokens.shape
            flat = tokens.reshape(-1, rows * columns, width)
        else:
            flat, (rows, columns) = tokens, self._grid(tokens.shape[1] - self.prefix_tokens)
        if not by_kernel:
            if rows * columns > MOST_PATCHES:
                return super().forward(tokens)
            hidden = norm(predict_by_product(flat, first.weight, (rows, columns)))
            return mix_by_matrix(flat, second(hidden).softmax(dim=1)).view(tokens.shape)
        if torch.is_autocast_enabled("cuda"):  # once, for the predictor's product and for the mixing
            flat = flat.to(torch.get_autocast_dtype("cuda"))
        if _normalises_by_batch(norm, flat.shape[0] * rows * columns):
            affine = (norm.weight, norm.bias, norm.eps)
            pooled, statistics = pool_tokens(flat, first.weight, affine, second.weight, (rows, columns))
            if not grad_is_recomputed():
                _track(norm, statistics, flat.shape[0] * rows * columns)
            return pooled.view(tokens.shape)
        # In the dtype of the convolution's output, as the norm's parameters may be in half precision too.
        hidden = norm(predict_hidden(flat, first.weight, (rows, columns)).to(first.weight.dtype))
        return mix_dilated(flat, hidden.float(), second.weight).view(tokens.shape)

    def pool(self, image: Tensor) -> Tensor:
        """Σ_k softmax(proj(x))_k · pool_k(x)."""
        pool = dilated_mean if self.dilated else box_mean
        return mix_poolings(image, self.proj(image).softmax(dim=1), pool, self.branches)

    @torch.no_grad()
    def _start_near_identity(self, count: int) -> None:
        """Make the batch norm's output constant, so that the second convolution favours branch 0 for any input."""
        _, norm, conv = self.proj
        assert isinstance(norm, nn.BatchNorm2d) and isinstance(conv, nn.Conv2d)
        nn.init.zeros_(norm.weight)
        nn.init.ones_(norm.bias)
        last = conv.weight.zero_()
        last[:, :, 1, 1] = -_IDENTITY_MARGIN / (2 * count)
        last[0, :, 1, 1] = _IDENTITY_MARGIN / (2 * count)


def fits_kernel(tokens: Tensor, layout: str, branches: int) -> bool:
    """Whether the fused kernel takes these tokens: channels last, on a GPU, and not during an export."""
    if layout == "BCHW" or branches > MOST_BRANCHES or exporting():
        return False
    return chosen(tokens) == "triton"


def _is_hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a convolution with its weight and no more: peft may replace it, and pruning adds a hook."""
    return type(module).forward is nn.Conv2d.forward and module.bias is None and not _is_hooked(module)


def _normalises_by_batch(norm: nn.Module, count: int) -> TypeGuard[nn.BatchNorm2d]:
    """Whether the norm is a plain batch norm that normalises by the statistics of this process's batch, and no more."""
    if not isinstance(norm, nn.BatchNorm2d) or type(norm) not in (nn.BatchNorm2d, SharedBatchNorm2d):
        return False
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    learned = norm.training and norm.affine and norm.momentum is not None and norm.weight.dtype == torch.float32
    alone = not (several and torch.distributed.get_world_size() > 1)
    return learned and alone and count > 1 and not _is_hooked(norm)


@torch.no_grad()
def _track(norm: nn.BatchNorm2d, statistics: Tensor, count: int) -> None:
    """Update the running statistics as the norm would."""
    mean, variance, momentum = norm.running_mean, norm.running_var, norm.momentum
    if not norm.track_running_stats or mean is None or variance is None or momentum is None:
        return
    track((mean, variance, norm.num_batches_tracked), statistics, momentum, count)


class FixedPooling(TokenPooling):
    """The same mean around every token."""

    def __init__(self, radius: int, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self.radius = radius

    def pool(self, image: Tensor) -> Tensor:
        """The mean of the (2·radius + 1)² window."""
        return box_mean(image, self.radius)


class LearnedPooling(TokenPooling):
    """The same learned convolution around every token."""

    def __init__(self, radius: int, near_identity: bool, width: int, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self.conv = nn.Conv2d(width, width, 2 * radius + 1, padding=radius, bias=False)
        if near_identity:
            nn.init.dirac_(self.conv.weight)

    def pool(self, image: Tensor) -> Tensor:
        """The convolution."""
        return self.conv(image)


@handles(TokenAwarePooling)
def insert_pooling(config: TokenAwarePooling, anatomy: Anatomy, surgeon: Surgeon) -> None:
    """Put the pooling before the norm before attention, in every chosen block."""
    attending = [block for block in anatomy.trunk if block.mixes_tokens_by_attention]
    if not attending:
        raise VitfocusError(
            f"{config} pools tokens before they attend to each other, and {type(anatomy.root).__name__} has no "
            f"token attention (its blocks: {anatomy.attention_kinds})."
        )
    chosen = choose_blocks(config.layers, surgeon.ports(attending, "pool"))
    context = track_image_size(anatomy, surgeon)
    for block in chosen:
        name = "dilation_predictor" if config.mode in _MIXING else "local_pooling"
        surgeon.insert(block, "pool", name, _build(config, block, context))


def _build(config: TokenAwarePooling, block: Block, context: ForwardContext) -> TokenPooling:
    port = block.ports["pool"]
    where = (port.layout, block.prefix_tokens, block.grid_rule, context)
    if config.mode in _MIXING:
        return DilationPredictor(config, port.width, *where)
    radius = int(config.mode[-1]) // 2
    if config.mode.startswith("average"):
        return FixedPooling(radius, *where)
    return LearnedPooling(radius, config.init == "near_identity", port.width, *where)
