"""The Attention Diversification Loss: how similar are the rows of an attention map?

"Robustifying Token Attention for Vision Transformers" (Guo et al., ICCV 2023), section 3.3. Two forms exist. `paper`
is equations (1) and (2): threshold each row with ≥ τ/N, then compare it with the mean of the thresholded rows.
`official` is what the authors' released code computes: the mean of the rows before thresholding, thresholded itself,
with a strict >. In the released code a batch of one loses its batch axis and gives a loss of zero; not here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Variant = Literal["official", "paper"]
Heads = Literal["mean", "each"]

#: Rows of K entries that are shorter than this over K count as empty: their gradient would overflow. All that a row
#: attends to may be a class token, which is left out.
SHORTEST = 1e-8


def row_similarity(
    attention: Tensor, *, variant: Variant = "official", heads: Heads = "mean", threshold: float = 2.0
) -> Tensor:
    """The mean cosine between the rows of attention maps (B, H, Q, K) and their mean row: a scalar in [0, 1].

    A row with nothing above the threshold contributes 0 and receives no gradient.

    >>> uniform, diagonal = torch.full((1, 1, 4, 4), 0.25), torch.eye(4).expand(1, 1, 4, 4)
    >>> row_similarity(uniform, threshold=1.0, variant="paper").item()
    1.0
    >>> round(row_similarity(diagonal, threshold=1.0, variant="paper").item(), 3)
    0.5
    """
    maps = attention.mean(dim=1) if heads == "mean" else attention.flatten(0, 1)
    bound = threshold / maps.shape[-1]
    if variant == "official":
        mean = maps.mean(dim=-2, keepdim=True)
        rows, mean = _drop(maps, maps <= bound), _drop(mean, mean <= bound)
    else:
        rows = _drop(maps, maps < bound)
        mean = rows.mean(dim=-2, keepdim=True)
    dots = (rows * mean).sum(dim=-1)
    return (dots * _inverse_norm(rows) * _inverse_norm(mean)).mean()


def _drop(values: Tensor, where: Tensor) -> Tensor:
    """Set values to 0 where the mask is true; NaN is kept."""
    return torch.where(where, torch.zeros_like(values), values)


def _inverse_norm(vectors: Tensor) -> Tensor:
    """1 / ‖v‖, and 0 with a gradient of 0 for vectors that count as empty."""
    squares = vectors.square().sum(dim=-1)
    empty = squares < (SHORTEST / vectors.shape[-1]) ** 2
    inverse = torch.where(empty, torch.ones_like(squares), squares).rsqrt()
    return torch.where(empty, torch.zeros_like(inverse), inverse)
