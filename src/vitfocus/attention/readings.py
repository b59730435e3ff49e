"""The readings of a diagnosis, one record each: its number, table column, thresholds and chart.

`READINGS` is the registry that diagnoses, tables, comparisons, findings, figures and reports go through. To add a
reading, add a record. Its number comes from one of four places: `total`, a sum of the fused statistics
(`vitfocus.kernels.statistics`, where each is defined on whole maps); `rows`, a function of rows of attention, which
needs nothing else and runs on every device; `norms`, a function of the norms of the patch tokens after the block; or
`scale`, a function of the learned scale of Context Broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from vitfocus.core.records import Count, OpenDict
from vitfocus.kernels.statistics.reference import TOP

#: An outlier's norm is at least so many times the median of its image, and so many robust standard deviations above it.
TIMES, DEVIATIONS = 2.0, 5.0


class LayerRow(OpenDict):
    """The numbers of one layer."""

    numbers = True

    class fields(msgspec.Struct):  # noqa: D106
        layer: Count
        name: str
        attention_kind: str = ""


@dataclass(frozen=True)
class Threshold:
    """When a number deserves a sentence, a finding.

    Attributes:
        name: the key in `diagnosis.json`, and the kind of the finding.
        value: the value from which on the sentence is true.
        sentence: follows "Layers 1 and 2: "; {} is the value or range of values, {bound} the bound of the entropy,
            {share} the value as a share of `share_of`.
        below: the sentence is true at or below the value, not at or above it.
        share_of: the key of a number that the value is divided by before it is compared.
    """

    name: str
    value: float
    sentence: str = ""
    below: bool = False
    share_of: str = ""

    def holds(self, row: LayerRow, key: str, threshold: float | None = None) -> bool:
        """Whether the sentence is true of a layer's row."""
        if key not in row or (self.share_of and not row.get(self.share_of)):
            return False
        value = row[key] / row[self.share_of] if self.share_of else row[key]
        limit = self.value if threshold is None else threshold
        return bool(value <= limit if self.below else value >= limit)


@dataclass(frozen=True)
class Chart:
    """How a number is drawn by depth.

    Attributes:
        title: the chart's title.
        axis: the label of the vertical axis.
        meaning: a sentence or two for the report's reader.
        factor: what values are multiplied by (100 for percent).
        unit: printed after means.
        low: the lower end of the axis; None lets the values decide.
        high: the upper end.
        figure: the name that `Diagnosis.plot` knows it by; empty for none.
        second: the key of a second, dashed line per model, and what it is called.
        band: what the band around a line spans; empty for none.
    """

    title: str
    axis: str
    meaning: str
    factor: float = 1.0
    unit: str = ""
    low: float | None = None
    high: float | None = None
    figure: str = ""
    second: tuple[str, str] = ("", "")
    band: str = ""


@dataclass(frozen=True)
class Reading:
    """One number of a layer's row.

    Attributes:
        key: its key in `Diagnosis.rows`.
        heading: the heading of its table column; empty for none.
        format: the format of a cell.
        label: what a sentence that compares two diagnoses calls it; empty if it is not compared.
        total: a sum over all batches: a field of `Numbers`, "bound", "p15", "p85" or "stability".
        per: what the total is divided by, a key of `LayerReadings.counts`, or nothing; absent if the count is 0.
        finish: applied to the mean and the number of heads.
        rows: a function of attention rows (..., T, K) to (..., T), averaged over images, heads and rows.
        norms: a function of the norms (B, N) of patch tokens at the block's output, of their medians (B, 1), and of
            which of them are outliers (`high_norm`), to (B,), averaged over images.
        scale: a function of the scaling weights λ (float64) that Context Broadcasting added to the block.
        thresholds: when it deserves a sentence.
        chart: how it is drawn by depth.
    """

    key: str
    heading: str = ""
    format: str = ".2f"
    label: str = ""
    total: str = ""
    per: str = "rows"
    finish: Callable[[float, int], float] | None = None
    rows: Callable[[Tensor], Tensor] | None = None
    norms: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    scale: Callable[[Tensor], float | None] | None = None
    thresholds: tuple[Threshold, ...] = ()
    chart: Chart | None = None


def context_scale(block: nn.Module) -> Tensor | None:
    """The scaling weights λ of a block: every parameter named `context_scale` in it, joined; None if there is none."""
    found = [value for module in block.modules() if (value := module._parameters.get("context_scale")) is not None]
    return torch.cat([value.detach().flatten() for value in found]).double().cpu() if found else None


def high_norm(norms: Tensor) -> Tensor:
    """Which of the norms (B, N) of each image's patches are far above the others: (B, N), boolean.

    >>> high_norm(torch.tensor([[1.0, 1.1, 0.9, 1.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0]])).tolist()
    [[False, False, False, False, True], [False, False, False, False, False]]
    """
    return median_and_outliers(norms)[1]


def median_and_outliers(norms: Tensor) -> tuple[Tensor, Tensor]:
    """The median (B, 1) of the norms (B, N) of each image's patches, and which are far above the others (B, N).

    The median and the median absolute deviation of the image decide, so the outliers themselves do not move the
    threshold.
    """
    median = norms.median(dim=1, keepdim=True).values
    spread = 1.4826 * (norms - median).abs().median(dim=1, keepdim=True).values
    return median, norms > torch.maximum(TIMES * median, median + DEVIATIONS * spread)


def scaling_ratio(scale: Tensor) -> float | None:
    """|λ|₀.₁ / |λ|₀.₉ (Context Broadcasting's Figure 8): near 1 if all channels are scaled alike; None if all are 0."""
    low, high = torch.quantile(scale.abs(), scale.new_tensor([0.1, 0.9])).tolist()
    return low / high if high > 0 else None


_ENTROPY = Chart(
    "Entropy",
    "entropy of a row of attention (nats)",
    "How widely a token attends: exp(entropy) is roughly the number of tokens it attends to. At the dashed bound it "
    "attends to all equally. The band spans the 15th to 85th percentile of the rows; the dotted line is the class "
    "token.",
    unit="nats",
    low=0.0,
    figure="entropy",
    second=("entropy_cls", "class token"),
    band="15th to 85th percentile of the rows",
)
_OVERFOCUS = Chart(
    "Overfocus",
    f"attention received by the top {TOP:.0%} of tokens (%)",
    f"The share of all attention that the most attended {TOP:.0%} of the tokens receive. The dashed line is uniform "
    "attention. Far above it, all queries attend to the same few tokens: vertical lines in the attention map, easily "
    "disturbed by noise.",
    factor=100.0,
    unit="%",
    low=0.0,
    figure="overfocus",
)

READINGS: dict[str, Reading] = {
    reading.key: reading
    for reading in (
        Reading(
            "entropy",
            "entropy",
            label="mean entropy in nats",
            total="entropy",
            thresholds=(
                Threshold(
                    "narrow",
                    0.35,
                    "the mean entropy is {} of at most {bound:.2f} nats ({share}): a query looks at very few tokens.",
                    below=True,
                    share_of="entropy_bound",
                ),
            ),
            chart=_ENTROPY,
        ),
        Reading("entropy_bound", "of max.", total="bound", per="queries"),
        Reading("entropy_p15", "p15", total="p15", per=""),
        Reading(
            "entropy_p85",
            "p85",
            total="p85",
            per="",
            thresholds=(
                Threshold(
                    "spread",
                    0.90,
                    "15 % of the rows have an entropy of {} nats or more, {share} of that of uniform attention.",
                    share_of="entropy_bound",
                ),
            ),
        ),
        Reading(
            "entropy_cls", "class", label="the class token's entropy in nats", total="first", per="class_token_maps"
        ),
        Reading(
            "distance",
            "dist.",
            ".3f",
            label="relative distance",
            total="distance",
            per="placed_images",
            chart=Chart(
                "Distance",
                "mean distance to attended tokens (sides, L1)",
                "How far away the attended tokens are, in sides of the image (or of the window). Small values mean "
                "local attention, like a convolution; uniform attention over a square has about 0.67.",
                unit="sides",
                low=0.0,
                figure="distance",
            ),
        ),
        Reading(
            "gradient",
            "grad.",
            ".3f",
            label="softmax gradient",
            total="squares",
            finish=lambda squares, heads: 1 - squares,  # rows sum to one
        ),
        Reading(
            "overfocus",
            "overfocus",
            ".1%",
            label="overfocus",
            total="top",
            per="maps",
            thresholds=(Threshold("overfocus", 0.30),),  # worded layer by layer in findings.py
            chart=_OVERFOCUS,
        ),
        Reading(
            "effective_tokens",
            "eff. tokens",
            ".1f",
            label="the number of effective tokens",
            total="effective",
            per="maps",
            chart=Chart(
                "Effective tokens",
                "effective number of attended tokens",
                "The effective number of tokens that receive attention from all queries together. Small values mean "
                "overfocus.",
                unit="tokens",
                low=0.0,
            ),
        ),
        Reading(
            "head_similarity",
            "heads alike",
            label="similarity of heads",
            total="joint",
            per="images_of_many_heads",
            finish=lambda cosines, heads: (cosines - heads) / (heads * (heads - 1)),  # each head's with itself is 1
            thresholds=(Threshold("alike_heads", 0.80, "the heads' maps have a mean cosine similarity of {}."),),
            chart=Chart(
                "Head similarity",
                "mean cosine similarity of the heads' maps",
                "The mean cosine similarity between the maps of a layer's heads. Near 1 the heads are redundant; lower "
                "values mean that they attend to different tokens.",
                high=1.0,
                figure="heads",
            ),
        ),
        Reading(
            "diversity_official",
            "rows alike",
            label="similarity of rows",
            total="official",
            per="token_images",
            thresholds=(
                Threshold("alike_rows", 0.80, "the rows of a map have a cosine similarity of {} with their mean."),
            ),
            chart=Chart(
                "Row similarity (ADL)",
                "mean cosine similarity with the mean row",
                "What the Attention Diversification Loss reduces: at 1 all queries attend to the same tokens. Only "
                "attention above twice the uniform share (2/K of K tokens) counts, so a uniform map has 0.",
                high=1.0,
                figure="diversity",
                second=("diversity_paper", "as in the paper"),
            ),
        ),
        Reading("diversity_paper", total="paper", per="token_images"),
        Reading(
            "stability",
            "stability",
            label="stability",
            total="stability",
            per="paired_maps",
            thresholds=(
                Threshold(
                    "unstable",
                    0.70,
                    "{under} the maps have a cosine similarity of only {} with the clean ones.",
                    below=True,
                ),
            ),
            chart=Chart(
                "Stability",
                "cosine similarity, clean and corrupted maps",
                "The cosine similarity between a layer's attention maps on the clean and on the corrupted image: 1 "
                "means that it attends to the same tokens. The band spans the middle half of all images and heads.",
                high=1.0,
                figure="stability",
            ),
        ),
        Reading(
            "high_norm",
            "high norm",
            ".2%",
            label="the share of high-norm patch tokens",
            norms=lambda norms, median, outliers: outliers.float().mean(dim=1),
            thresholds=(
                Threshold(
                    "high_norm", 0.005, "{} of the patch tokens have a norm far above the others of their image."
                ),
            ),
            chart=Chart(
                "High-norm tokens",
                "patch tokens of high norm (%)",
                "The share of patch tokens whose norm after the block is far above the others of their image: more "
                f"than {TIMES:g} times the median, and {DEVIATIONS:g} robust standard deviations above it. Large "
                "models keep global information there, and the content of the patch is lost.",
                factor=100.0,
                unit="%",
                low=0.0,
                figure="high_norm",
            ),
        ),
        Reading(
            "norm_ratio",
            norms=lambda norms, median, outliers: norms.amax(dim=1) / median[:, 0].clamp_min(1e-12),
        ),
        Reading(
            "scaling_mean",
            "λ mean",
            "z.3f",
            scale=lambda scale: float(scale.mean()),
            chart=Chart(
                "Scale of Context Broadcasting",
                "mean of the scaling weights λ",
                "How much of the mean token the scaled Context Broadcasting learned to add in each block; 0 adds "
                "nothing.",
                figure="scaling",
            ),
        ),
        Reading("scaling_ratio", "λ ratio", scale=scaling_ratio),
        Reading("scaling_magnitude", scale=lambda scale: float(scale.abs().mean())),
    )
}


def columns() -> dict[str, tuple[str, str]]:
    """The heading and format of each column of a diagnosis's table, in order."""
    shown = {key: (reading.heading, reading.format) for key, reading in READINGS.items() if reading.heading}
    return {"layer": ("layer", "d"), "attention_kind": ("kind", "s")} | shown


def cell(row: Mapping[str, Any], key: str) -> str:
    """One value of a row as text, or a dash where it has no meaning.

    >>> cell({"overfocus": 0.4231}, "overfocus"), cell({}, "distance")
    ('42.3%', '–')
    """
    return format(row[key], columns()[key][1]) if row.get(key) is not None else "–"


def charts() -> dict[str, Chart]:
    """How each reading that is drawn by depth is drawn, by its key."""
    return {key: reading.chart for key, reading in READINGS.items() if reading.chart is not None}


def figures() -> dict[str, str]:
    """The keys of the readings that `Diagnosis.plot` draws, by the name of the figure."""
    return {chart.figure: key for key, chart in charts().items() if chart.figure}
