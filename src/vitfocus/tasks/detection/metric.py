"""Detections in COCO's format, and COCO's average precision of boxes and masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torchvision.ops import box_convert

from vitfocus.data.detection.masks import encode_masks, mask_tools

KINDS = {"box": "bbox", "mask": "segm"}
_NAMES = {
    "ap": "AP_all",
    "ap50": "AP_50",
    "ap75": "AP_75",
    "ap_small": "AP_small",
    "ap_medium": "AP_medium",
    "ap_large": "AP_large",
}


def coco_results(
    predictions: Iterable[dict[str, Tensor]], image_ids: Iterable[int], category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Convert predictions to COCO's results: one dict per object, ready for JSON.

    Args:
        predictions: Per image `boxes` (n, 4), `labels` (n,) counted from 1, `scores` (n,) and `masks` (n, 1, H, W) as
            probabilities, as torchvision's detectors return them.
        image_ids: COCO's ids of the images.
        category_ids: COCO's ids of the labels 1, 2, ...
    """
    results = []
    for one, image_id in zip(predictions, image_ids, strict=True):
        boxes = box_convert(one["boxes"].float(), "xyxy", "xywh")
        outlines = encode_masks((one["masks"][:, 0] > 0.5).cpu().numpy())
        rows = zip(boxes.tolist(), one["labels"].tolist(), one["scores"].tolist(), outlines, strict=True)
        for box, label, score, outline in rows:
            category = category_ids[label - 1]
            record = {"image_id": image_id, "category_id": category, "bbox": box, "score": score}
            results.append({**record, "segmentation": outline})
    return results


def coco_scores(truth: dict[str, Any], found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """COCO's average precision.

    Args:
        truth: The content of COCO's JSON of instances; detections inside crowds are ignored.
        found: Detections as `coco_results` returns them.

    Returns:
        Scores in [0, 1]: box_ap, box_ap50, box_ap75, box_ap_small ..., mask_ap ... A size without objects has no score.

    Example:
        >>> outline = encode_masks([[[1, 1], [0, 0]]])[0]
        >>> thing = {"image_id": 1, "category_id": 5, "bbox": [0, 0, 2, 1], "segmentation": outline}
        >>> truth = {"images": [{"id": 1, "height": 2, "width": 2}], "categories": [{"id": 5, "name": "cup"}]}
        >>> truth["annotations"] = [{**thing, "id": 1, "area": 2, "iscrowd": 0}]
        >>> coco_scores(truth, [{**thing, "score": 0.9}])["box_ap"]
        1.0
    """
    mask_tools()  # an error that says what to install, if it is missing
    from faster_coco_eval import COCO, COCOeval_faster

    known = COCO({"info": {}, **truth}, use_deepcopy=True)
    scores: dict[str, float] = {}
    for kind, measure in KINDS.items():
        # Without the box the size of an object is the area of its mask, as COCO defines it for masks.
        left_out = "segmentation" if kind == "box" else "bbox"
        results = [{key: value for key, value in one.items() if key != left_out} for one in found]
        judge = COCOeval_faster(known, known.loadRes(results), measure, print_function=lambda *_: None)
        judge.run()
        reached = judge.stats_as_dict
        scores |= {f"{kind}_{ours}": reached[theirs] for ours, theirs in _NAMES.items() if reached[theirs] >= 0}
    return scores
