"""Token-aware Average Pooling: replace each token by a weighted sum of poolings of its neighbourhood.

"Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023), section 3.2 and figure 2, as released:
zero padding counts in the mean, so a window at the border still divides by its full number of taps.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def dilated_mean(image: Tensor, dilation: int) -> Tensor:
    """The mean of the 3×3 taps `dilation` apart around each position of (B, C, H, W); dilation 0 is the identity.

    >>> import torch
    >>> dilated_mean(torch.ones(1, 1, 3, 3), 1)[0, 0] * 9
    tensor([[4., 6., 4.],
            [6., 9., 6.],
            [4., 6., 4.]])
    """
    if dilation == 0:
        return image
    height, width = image.shape[-2:]
    step = dilation
    padded = F.pad(image, (step, step, step, step))
    columns = padded[..., :width] + padded[..., step : step + width] + padded[..., 2 * step : 2 * step + width]
    rows = (
        columns[..., :height, :] + columns[..., step : step + height, :] + columns[..., 2 * step : 2 * step + height, :]
    )
    return rows / 9


def box_mean(image: Tensor, radius: int) -> Tensor:
    """The mean of the (2·radius + 1)² window around each position of (B, C, H, W), padded zeros counted."""
    return image if radius == 0 else F.avg_pool2d(image, 2 * radius + 1, stride=1, padding=radius)


def mix_poolings(
    image: Tensor, weights: Tensor, pool: Callable[[Tensor, int], Tensor], count: int | None = None
) -> Tensor:
    """Σ_k w_k · pool(x, k): `image` (B, C, H, W), `weights` (B, K, H, W) summing to one over K, which is `count`.

    >>> import torch
    >>> image = torch.randn(1, 2, 4, 5)
    >>> first = torch.zeros(1, 3, 4, 5).index_fill(1, torch.tensor(0), 1.0)
    >>> torch.equal(mix_poolings(image, first, dilated_mean), image)
    True
    """
    mixed = weights[:, :1] * pool(image, 0)
    for branch in range(1, weights.shape[1] if count is None else count):
        mixed = mixed + weights[:, branch : branch + 1] * pool(image, branch)
    return mixed
