"""The metrics of evaluation and training: the name, the unit and the better direction of each key of results.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric. `title` is used in sentences, `short` in tables.

    `rank` says where it appears in a report: in the summary (headline), in the table only (detail), or nowhere because
    it describes the data or repeats another metric (context).
    """

    title: str
    short: str
    unit: str = "%"
    higher_is_better: bool = True
    rank: Literal["headline", "detail", "context"] = "headline"


#: The fifteen corruptions of ImageNet-C, over which mCE is a mean, in their order; and its four validation corruptions.
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

_ALEXNET = "% of AlexNet's"

#: Every metric by its key, in the order of tables. Values are in percent unless the title or unit says otherwise.
METRICS: dict[str, Metric] = {
    "miou": Metric("mIoU", "mIoU"),
    "macc": Metric("mean class accuracy", "mAcc", rank="detail"),
    "aacc": Metric("pixel accuracy", "aAcc", rank="detail"),
    "miou_corrupted": Metric("mean mIoU over the corruptions", "mIoU, corrupted"),
    "top1": Metric("top-1 accuracy", "top-1"),
    "top5": Metric("top-5 accuracy", "top-5", rank="detail"),
    "error": Metric("top-1 error", "error", higher_is_better=False, rank="context"),
    "ece": Metric("calibration error (ECE)", "ECE", higher_is_better=False, rank="detail"),
    "mce": Metric("mCE", "mCE", _ALEXNET, higher_is_better=False),
    "relative_mce": Metric("relative mCE", "rel. mCE", _ALEXNET, higher_is_better=False),
    "mean_error": Metric("mean error over the corruptions", "mean error", higher_is_better=False),
    "mfr": Metric("mean flip rate", "mFR", _ALEXNET, higher_is_better=False),
    "mt5d": Metric("mean top-5 distance", "mT5D", _ALEXNET, higher_is_better=False, rank="context"),
    "flip_probability": Metric("flip probability", "FP", higher_is_better=False),
    "mean_flip_probability": Metric("mean flip probability", "mean FP", higher_is_better=False, rank="context"),
    "mean_top5_distance": Metric("mean top-5 distance", "mean T5D (not %)", "", False, "context"),
    "box_ap": Metric("box AP", "box AP"),
    "box_ap50": Metric("box AP50", "box AP50", rank="detail"),
    "box_ap75": Metric("box AP75", "box AP75", rank="detail"),
    "mask_ap": Metric("mask AP", "mask AP"),
    "mask_ap50": Metric("mask AP50", "mask AP50", rank="detail"),
    "mask_ap75": Metric("mask AP75", "mask AP75", rank="detail"),
    "accuracy": Metric("accuracy", "accuracy"),
    "constant_accuracy": Metric("the best constant answer", "the best constant answer", rank="context"),
    "question_type_accuracy": Metric(
        "the best answer per question type", "the best answer per question type", rank="context"
    ),
}
