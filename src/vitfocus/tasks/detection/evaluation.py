"""Detections of a model in COCO's format, COCO's average precision, and images with detections drawn on them."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.ops import box_convert

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import atomic_path
from vitfocus.data.detection.dataset import DetectionDataset, decode_mask, encode_masks, mask_tools

KINDS = {"box": "bbox", "mask": "segm"}
_NAMES = {"ap": "AP_all", "ap50": "AP_50", "ap75": "AP_75"} | {
    f"ap_{s}": f"AP_{s}" for s in ("small", "medium", "large")
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


def check_truth(truth: dict[str, Any]) -> None:
    """Refuse a ground truth in the form of COCO's JSON without objects, or with run lengths that are not a mask."""
    if all(one.get("iscrowd") for one in truth["annotations"]):
        raise VitfocusError("The validation images have no objects, so nothing can be scored: use more of them.")
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    for one in truth["annotations"]:
        try:
            if isinstance(one["segmentation"], dict):
                decode_mask(one["segmentation"], *sizes[one["image_id"]])
        except (RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0].rstrip(".")
            raise VitfocusError(
                f"The run lengths of annotation {one['id']} are not a mask of its image: {said}."
            ) from None


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
    mask_tools()  # raises an error that says what to install, if missing
    from faster_coco_eval import COCO, COCOeval_faster

    # COCO's tools take the annotation 0 for "unmatched", and repeat one of two with the same id; images need ids below
    # 2^53 that are not negative.
    images = {number: place for place, number in enumerate(sorted(image["id"] for image in truth["images"]), start=1)}
    objects = [
        {**one, "id": place, "image_id": images[one["image_id"]]}
        for place, one in enumerate(truth["annotations"], start=1)
    ]
    pictures = [{**image, "id": images[image["id"]]} for image in truth["images"]]
    found = [{**one, "image_id": images[one["image_id"]]} for one in found]
    known = COCO({"info": {}, **truth, "images": pictures, "annotations": objects}, use_deepcopy=True)
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


Prediction = dict[str, Tensor]
_SMALLEST_SIDE = 320  # pixels of the short side; smaller images are enlarged, or captions would cover them


def draw_detections(image: Tensor, prediction: Prediction, classes: Sequence[str]) -> Image.Image:
    """Draw boxes, masks, names and scores of the detections with a score of 0.5 or more on an image, uint8 (3, H, W).

    >>> import torch
    >>> prediction = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    >>> prediction |= {"scores": torch.tensor([0.9]), "masks": torch.ones(1, 1, 64, 64)}
    >>> draw_detections(torch.zeros(3, 64, 64, dtype=torch.uint8), prediction, ["ring"]).size
    (320, 320)
    """
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    times = -(-_SMALLEST_SIDE // min(image.shape[1:]))
    image = image.cpu().repeat_interleave(times, 1).repeat_interleave(times, 2)
    kept = prediction["scores"].cpu() >= 0.5
    if kept.any():
        labels = prediction["labels"].cpu()[kept].tolist()
        scores = prediction["scores"].cpu()[kept].tolist()
        colours = [_colour(label) for label in labels]
        masks = prediction["masks"][:, 0].cpu()[kept] > 0.5
        masks = masks.repeat_interleave(times, 1).repeat_interleave(times, 2)
        captions = [f"{classes[label - 1]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
        for mask, colour in zip(masks, colours, strict=True):  # one by one: together, overlaps would be black
            image = draw_segmentation_masks(image, mask, alpha=0.45, colors=[colour])
        boxes = prediction["boxes"].float().cpu()[kept] * times
        style: dict[str, Any] = {"width": 2, "label_colors": "black", "fill_labels": True}
        image = draw_bounding_boxes(image, boxes, captions, colours, label_background_colors=colours, **style)
    drawn: Image.Image = to_pil_image(image)
    return drawn


class DetectionWriter:
    """Writes images with their detections to a folder, as COCO_ID.png."""

    def __init__(self, folder: str | Path, images: DetectionDataset) -> None:
        self.folder, self.images = Path(folder), images

    def __call__(self, index: int, image: Tensor, prediction: Prediction) -> None:
        with atomic_path(self.folder / f"{self.images.image_id(index):012d}.png") as path:
            draw_detections(image, prediction, self.images.classes).save(path, "PNG")


def _colour(label: int) -> tuple[int, int, int]:
    """A bright colour; the hues of neighbouring labels differ by the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.8, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
