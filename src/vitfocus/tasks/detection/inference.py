"""Runs a detector over a data set: results in COCO's format, and images with the detections drawn on them."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitfocus.anatomy import pixels_of, unwrap
from vitfocus.core.files import atomic_path
from vitfocus.core.modules import eval_mode
from vitfocus.data.detection.batches import EvaluationSamples
from vitfocus.data.detection.dataset import DetectionDataset
from vitfocus.data.image_files import Normalise
from vitfocus.data.loader import BrokenLog, evaluation_batches
from vitfocus.tasks.detection.metric import coco_results

Prediction = dict[str, Tensor]
_SMALLEST_PICTURE = 320  # pixels of the short side; smaller images are enlarged, or captions would cover them


@dataclass
class DetectorInference:
    """Runs a detector over the images of a data set; `watch(index, image, prediction)` is called for each of them."""

    images: DetectionDataset
    device: torch.device
    batch: int = 1
    workers: int = 0
    log: BrokenLog = field(default_factory=lambda: BrokenLog(fatal=True))
    say: Callable[[str], None] = print
    watch: Callable[[int, Tensor, Prediction], None] = lambda index, picture, prediction: None

    def __call__(
        self,
        model: nn.Module,
        indices: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[dict[str, Any]]:
        """The detections on these images as COCO's results; the model runs in eval mode."""
        model = unwrap(model)
        with eval_mode(model):
            return [one for batch in self.each(model, indices, autocast) for some in batch.values() for one in some]

    @torch.no_grad()
    def each(
        self,
        model: nn.Module,
        indices: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Iterator[dict[int, list[dict[str, Any]]]]:
        """The same by batches, as a dict by image index; the caller sets eval mode."""
        model = unwrap(model)  # DDP's forward pass would wait for processes with fewer batches
        wanted = pixels_of(model)
        normalise = Normalise(wanted.mean, wanted.std, self.device)
        keys = [list(indices[first : first + self.batch]) for first in range(0, len(indices), self.batch)]
        samples = EvaluationSamples(self.images)
        for items, _, _ in evaluation_batches(samples, keys, list, self.workers, self.device, self.log, self.say):
            with autocast():
                predictions = model([normalise(picture) for picture, _ in items])
            found = {}
            for (picture, index), prediction in zip(items, predictions, strict=True):
                found[index] = coco_results([prediction], [self.images.image_id(index)], self.images.category_ids)
                self.watch(index, picture, prediction)
            yield found


def draw_detections(picture: Tensor, prediction: Prediction, classes: Sequence[str], least: float = 0.5) -> Image.Image:
    """Draw boxes, masks, names and scores of the detections with at least a score on an image, uint8 (3, H, W).

    >>> prediction = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    >>> prediction |= {"scores": torch.tensor([0.9]), "masks": torch.ones(1, 1, 64, 64)}
    >>> draw_detections(torch.zeros(3, 64, 64, dtype=torch.uint8), prediction, ["ring"]).size
    (320, 320)
    """
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    times = -(-_SMALLEST_PICTURE // min(picture.shape[1:]))
    picture = picture.cpu().repeat_interleave(times, 1).repeat_interleave(times, 2)
    kept = prediction["scores"].cpu() >= least
    if kept.any():
        labels = prediction["labels"].cpu()[kept].tolist()
        scores = prediction["scores"].cpu()[kept].tolist()
        colours = [_colour(label) for label in labels]
        masks = prediction["masks"][:, 0].cpu()[kept] > 0.5
        masks = masks.repeat_interleave(times, 1).repeat_interleave(times, 2)
        captions = [f"{classes[label - 1]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
        for mask, colour in zip(masks, colours, strict=True):  # at once, torchvision would make overlaps black
            picture = draw_segmentation_masks(picture, mask, alpha=0.45, colors=[colour])
        boxes = prediction["boxes"].float().cpu()[kept] * times
        picture = draw_bounding_boxes(
            picture,
            boxes,
            captions,
            colors=colours,
            width=2,
            label_colors="black",
            label_background_colors=colours,
            fill_labels=True,
        )
    drawn: Image.Image = to_pil_image(picture)
    return drawn


class DetectionWriter:
    """A `watch` function that writes images with their detections to a folder, as COCO_ID.png."""

    def __init__(self, folder: str | Path, images: DetectionDataset, least: float = 0.5) -> None:
        self.folder, self.images, self.least = Path(folder), images, least

    def __call__(self, index: int, picture: Tensor, prediction: Prediction) -> None:
        with atomic_path(self.folder / f"{self.images.image_id(index):012d}.png") as path:
            draw_detections(picture, prediction, self.images.classes, self.least).save(path, "PNG")


def _colour(label: int) -> tuple[int, int, int]:
    """A bright colour; the hues of neighbouring labels differ by the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.8, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
