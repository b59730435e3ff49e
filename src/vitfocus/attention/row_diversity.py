"""Row diversity: how alike the rows of a map are, as the Attention Diversification Loss measures it.

The mean cosine of every thresholded row with their average; low is diverse. `paper` is equations (1) and (2);
`official` is the released code, which averages before thresholding and then thresholds the average too. Both average
the heads first. Training with the loss is `treatments`' business; here it is a number to read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfocus.attention.reading import Geometry, Mean, Number, Reading, Tile
from vitfocus.kernels.diversity.op import Variant, row_similarity
from vitfocus.kernels.statistics.op import Numbers, Statistics

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
        self.means = {"official": Mean(_cosines), "paper": Mean(_cosines)}

    def begin(self, images: int, heads: int, geometry: Geometry) -> None:
        """Note the size and the threshold."""
        self.least = THRESHOLD / geometry.keys
        self.shape = (images, geometry.keys)
        self.queries = geometry.queries

    def make_room(self, like: Tensor) -> None:
        """Start with empty sums of unit rows and of what the average is taken of, for each form."""
        # x ≥ t is x > the number just below t, and `threshold` keeps what is greater, in one go.
        least, zero = torch.tensor([self.least, 0.0], dtype=like.dtype)
        self.below = float(torch.nextafter(least, zero))
        self.sums = like.new_zeros(2, 2, *self.shape)

    def add(self, tile: Tile) -> None:
        """Add the tile's rows."""
        rows = tile.head_mean
        (units, total), paper = self.sums
        strict = F.threshold(rows, self.least, 0.0)
        units += torch.bmm(_one_over_norm(strict), strict)[:, 0]
        total += rows.sum(dim=1)
        kept = F.threshold(rows, self.below, 0.0)
        weights = _one_over_norm(kept)
        paper += torch.bmm(torch.cat([weights, torch.ones_like(weights)], dim=1), kept).transpose(0, 1)

    def end(self) -> None:
        """Bring unit rows and average together."""
        units, totals = self.sums.unbind(dim=1)
        averages = totals / self.queries
        torch.threshold_(averages[0], self.least, 0.0)
        norms = torch.linalg.vector_norm(averages, dim=-1)
        products = averages.mul_(units).sum(dim=-1)
        for mean, product, norm in zip(self.means.values(), products.unbind(), norms.unbind(), strict=True):
            mean.add(product, norm, weight=1 / self.queries)
        del self.sums

    def look(self, made: Statistics, products: Tensor | None) -> None:
        """Count the images."""
        for mean in self.means.values():
            mean.expect(self.shape[0])

    def fill(self, totals: Numbers) -> None:
        """Take in the mean cosines of both forms."""
        self.means["official"].give(totals.official)
        self.means["paper"].give(totals.paper)

    def row(self) -> dict[str, Number]:
        """`diversity_official` and `diversity_paper`, from 0 (all rows differ) to 1 (all alike)."""
        return {f"diversity_{form}": mean.value for form, mean in self.means.items()}


def _cosines(products: Tensor, norms: Tensor) -> Tensor:
    """Cosines from inner products with unit vectors; an empty row's is 0."""
    return products / norms.clamp_min(EPSILON)


def _one_over_norm(rows: Tensor) -> Tensor:
    """One over every row's length (B, 1, T); an empty row's is large but meets only zeros."""
    return torch.linalg.vector_norm(rows, dim=-1).clamp_min(EPSILON).reciprocal()[:, None]
