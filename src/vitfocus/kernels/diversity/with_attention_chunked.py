"""Attention and the diversification loss in plain torch on a CPU, both from the same maps.

Torch's attention gives the output and the normalisers of the maps, which are computed for one head of some images at a
time. None is kept, only the loss's gradient with respect to the mean maps: the backward pass computes each head's maps
once more, as attention's own does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vitfocus.kernels.attention import attention_with_normalisers, keeps_normalisers
from vitfocus.kernels.diversity.chunked import IMAGES_CHUNK, Compared, LossOptions, Maps

#: The most tokens, as a multiple of a block's channels, and so the most that is kept, as a multiple of the queries. A
#: block of a transformer keeps about sixteen times the queries for its backward pass.
KEPT_OVER_QUERIES = 1.1


def fits(query: Tensor, key: Tensor, value: Tensor, options: LossOptions) -> bool:
    """Whether both are computed together: self-attention on a CPU, in full precision, of few tokens."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.dtype == key.dtype == value.dtype
        and query.ndim == 4
        and query.shape == key.shape == value.shape
        and query.numel() > 0
        and options.average_heads
        and keeps_normalisers(query, key, value, options.scale)
        and options.first < query.shape[2] <= KEPT_OVER_QUERIES * query.shape[1] * query.shape[3]
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, options: LossOptions, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, loss, log Σ exp (B, H, N), and the gradient of the loss with respect to the compared mean maps."""
    batch, heads, count, _ = query.shape
    out, lse = attention_with_normalisers(query, key, value, scale=options.scale)
    mean = query.new_empty(batch, count, count)
    for images, head in _chunks(query):
        chunk = _maps(query, key, lse, options.scale, images, head)
        if head == 0:
            torch.mul(chunk, 1 / heads, out=mean[images])
        else:
            mean[images].add_(chunk, alpha=1 / heads)
    maps = _Mean(Maps(query, key, None, None, options), mean, wants_gradient)
    return out, maps.loss().mean(), lse, maps.slope


def _chunks(query: Tensor) -> Iterator[tuple[slice, int]]:
    """Images and a head, so that their maps fit into a core's fastest caches. A head's tokens are read in place."""
    batch, heads, count, _ = query.shape
    at_once = max(1, IMAGES_CHUNK // count**2)
    for start in range(0, batch, at_once):
        for head in range(heads):
            yield slice(start, min(start + at_once, batch)), head


def _maps(query: Tensor, key: Tensor, lse: Tensor, scale: float, images: slice, head: int) -> Tensor:
    """Attention (b, N, N) of one head."""
    return torch.baddbmm(-lse[images, head, :, None], query[images, head], key[images, head].mT, alpha=scale).exp_()


class _Mean(Compared):
    """Mean maps (B, N, N); `slope` is the gradient with respect to the compared rows."""

    def __init__(self, maps: Maps, mean: Tensor, learns: bool) -> None:
        super().__init__(maps, len(mean), [slice(0, maps.count)], learns)
        self.mean, self.slope = mean, mean.new_empty(0)

    def rows(self, part: slice) -> Tensor:
        """All compared rows."""
        return self.mean[:, self.options.first :]

    def take(self, slope: Tensor, part: slice) -> None:
        """Keep the gradient."""
        self.slope = slope


def gradients(
    gradient: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: LossOptions,
    lse: Tensor,
    slopes: Tensor,
) -> Tensor:
    """Gradients of queries, keys and values, (3, B, H, N, D); in memory (B, N, 3, H, D).

    From those of the output, `gradient` (B, H, N, D), and of the loss, `weight`, and from what `forward` kept.
    """
    batch, heads, count, width = query.shape
    made = query.new_empty(batch, count, 3, heads, width).permute(2, 0, 3, 1, 4)
    slopes = slopes * weight
    for images, head in _chunks(query):
        incoming = gradient[images, head]
        chunk = _maps(query, key, lse, options.scale, images, head)
        slope = torch.bmm(incoming, value[images, head].mT)
        slope[:, options.first :] += slopes[images]
        slope = torch._softmax_backward_data(slope, chunk, -1, chunk.dtype)
        torch.mul(torch.bmm(slope, key[images, head]), options.scale, out=made[0, images, head])
        torch.mul(torch.bmm(slope.mT, query[images, head]), options.scale, out=made[1, images, head])
        made[2, images, head] = torch.bmm(chunk.mT, incoming)
    return made
