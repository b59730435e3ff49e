"""Row diversity: how alike the rows of a map are, as the Attention Diversification Loss measures it.

The mean cosine of every thresholded row with their average; low is diverse. `paper` is equations (1) and (2);
`official` is the released code, which averages before thresholding and then thresholds the average too. Both average
the heads first. Training with the loss is `treatments`' business; here it is a number to read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.attention.reading import Geometry, Mean, Reading, Tile
from vitfocus.kernels.diversity import Variant, row_similarity

THRESHOLD = 2.0
EPSILON = 1e-8


def row_diversity(maps: Tensor, form: Variant = "official") -> Tensor:
    """The loss's value for maps (B, H, Q, K), heads averaged first: a scalar. A row without an entry counts 0.

    >>> lines = torch.zeros(1, 1, 8, 8).index_fill(-1, torch.tensor(3), 1.0)
    >>> row_diversity(lines), row_diversity(torch.eye(8)[None, None], form="paper")
    (tensor(1.), tensor(0.3536))
    """
    return row_similarity(maps, variant=form, heads="mean", threshold=THRESHOLD)


class DiversityReading(Reading):
    """Both forms in one pass.

    The mean cosine is (Σ_i row_i / ‖row_i‖) · average / ‖average‖, so the sum of unit rows and the average, which are
    known only at the end, need not meet any row again.
    """

    def __init__(self) -> None:
        self.means = {"official": Mean(), "paper": Mean()}

    def begin(self, images: int, heads: int, geometry: Geometry, like: Tensor) -> None:
        """Start with empty sums of unit rows and of rows."""
        self.least = THRESHOLD / geometry.keys
        # x ≥ t is x > the number just below t, and `threshold` keeps what is greater, in one go.
        self.below = float(torch.nextafter(like.new_tensor(self.least), like.new_tensor(0.0)))
        self.queries = geometry.queries
        # For each form: the sum of unit rows, then the sum of what its average is taken of.
        self.official, self.paper = like.new_zeros(2, images, 2, geometry.keys)

    def add(self, tile: Tile) -> None:
        """Add the tile's rows."""
        rows = tile.head_mean
        strict = F.threshold(rows, self.least, 0.0)
        self.official[:, 0] += torch.bmm(_one_over_norm(strict), strict)[:, 0]
        self.official[:, 1] += rows.sum(dim=1)
        kept = F.threshold(rows, self.below, 0.0)
        weights = _one_over_norm(kept)
        self.paper += torch.bmm(torch.cat([weights, torch.ones_like(weights)], dim=1), kept)

    def end(self) -> None:
        """Bring unit rows and average together."""
        official, paper = self.official / self.queries, self.paper / self.queries
        official[:, 1] = F.threshold(official[:, 1], self.least, 0.0)
        for form, sums in (("official", official), ("paper", paper)):
            units, average = sums.unbind(dim=1)
            norm = torch.linalg.vector_norm(average, dim=-1).clamp_min(EPSILON)
            self.means[form].add((units * average).sum(dim=-1) / norm)

    def row(self) -> dict[str, float]:
        """`diversity_official` and `diversity_paper`, from 0 (all rows differ) to 1 (all alike)."""
        return {f"diversity_{form}": mean.value for form, mean in self.means.items()}


def _one_over_norm(rows: Tensor) -> Tensor:
    """One over every row's length (B, 1, T); an empty row's is large but meets only zeros."""
    return torch.linalg.vector_norm(rows, dim=-1).clamp_min(EPSILON).reciprocal()[:, None]
