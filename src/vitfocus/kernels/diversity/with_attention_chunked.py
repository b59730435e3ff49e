"""Attention and the diversification loss in plain torch on a CPU, whose gradients share the maps.

Torch's attention gives the output. The loss needs the maps of all heads, which are kept for the backward pass: from
them it computes the gradients of both, in fewer passes than attention's own takes for short sequences. Only maps that
are small beside what a block keeps anyway are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.kernels.diversity.chunked import Compared, LossOptions, Maps, products

#: Maps are kept if they take at most this many times the memory of the queries: up to 320 keys with heads of 64
#: channels. A block of a transformer keeps about sixteen times the queries for its backward pass.
KEPT_OVER_QUERIES = 5


def fits(query: Tensor, key: Tensor, value: Tensor, options: LossOptions) -> bool:
    """Whether the maps of these tensors are kept: self-attention on a CPU, in full precision, of few tokens."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.dtype == key.dtype == value.dtype
        and query.ndim == 4
        and query.shape == key.shape == value.shape
        and query.numel() > 0
        and options.first < query.shape[2] <= KEPT_OVER_QUERIES * query.shape[3]
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, options: LossOptions, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and loss; attention (B, H, N, N), and the gradient of the loss with respect to the compared maps."""
    maps = Maps(query, key, None, None, options)
    out = F.scaled_dot_product_attention(query, key, value, scale=options.scale)
    losses = query.new_empty(maps.batch * maps.groups)
    kept = maps.batch if wants_gradient else 0
    attention = query.new_empty(kept, maps.heads, maps.keys, maps.keys)
    slopes = query.new_empty(kept * maps.groups, maps.count, maps.keys)
    for images in maps.images():
        mine = slice(images.start * maps.groups, images.stop * maps.groups)
        losses[mine] = _Kept(maps, images, attention[images], slopes[mine], wants_gradient).loss()
    return out, losses.mean(), attention, slopes


class _Kept(Compared):
    """Maps of some images, which are written to `kept`, and their gradients to `slopes`."""

    def __init__(self, maps: Maps, images: slice, kept: Tensor, slopes: Tensor, wants_gradient: bool) -> None:
        super().__init__(maps, images, wants_gradient)
        query, key = (maps.query[images] * self.options.scale), maps.key[images]
        scores = products(query, key.mT)
        self.whole = torch.softmax(scores, dim=-1, out=kept) if wants_gradient else scores.softmax(dim=-1)
        self.slopes = slopes

    def attention(self, part: slice) -> Tensor:
        """Attention of some rows, (b, H, r, K)."""
        return self.maps.pick(self.whole)[:, :, part]

    def take(self, attention: Tensor, slope: Tensor, part: slice) -> None:
        """Keep the gradient of some rows of the compared maps."""
        self.slopes[:, part] = slope


def gradients(
    gradient: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: LossOptions,
    attention: Tensor,
    slopes: Tensor,
) -> Tensor:
    """Gradients of queries, keys and values, (3, B, H, N, D); in memory (B, N, 3, H, D).

    From those of the output, `gradient` (B, H, N, D), and of the loss, `weight`, and from what `forward` kept.
    """
    maps = Maps(query, key, None, None, options)
    batch, heads, count, width = query.shape
    made = query.new_empty(batch, count, 3, heads, width).permute(2, 0, 3, 1, 4)
    for images in maps.images():
        mine = slice(images.start * maps.groups, images.stop * maps.groups)
        incoming, whole = gradient[images].contiguous(), attention[images]
        slope = products(incoming, value[images].mT)
        slope[:, :, options.first :] += maps.by_head(slopes[mine] * weight)
        slope = torch._softmax_backward_data(slope, whole, -1, whole.dtype)
        torch.mul(products(slope, key[images]), options.scale, out=made[0, images])
        torch.mul(products(slope.mT, query[images]), options.scale, out=made[1, images])
        made[2, images] = products(whole.mT, incoming)
    return made
