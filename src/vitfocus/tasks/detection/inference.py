"""A detector on a set of pictures: everything it finds as COCO writes it, and pictures of that for people."""

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
from vitfocus.data.classification.dataset import BrokenLog
from vitfocus.data.detection.batches import EvaluationSamples
from vitfocus.data.detection.dataset import Detections
from vitfocus.data.sample_loader import read_ahead
from vitfocus.tasks.detection.metric import coco_findings

Finding = dict[str, Tensor]
_SMALLEST_PICTURE = 320  # pixels of the shorter side; smaller ones are enlarged, or their captions would hide them


@dataclass
class Searcher:
    """Runs a detector over pictures by index; `watch(index, picture, finding)` sees every one of them."""

    images: Detections
    device: torch.device
    batch: int = 1
    workers: int = 0
    log: BrokenLog = field(default_factory=lambda: BrokenLog(fatal=True))
    say: Callable[[str], None] = print
    watch: Callable[[int, Tensor, Finding], None] = lambda index, picture, finding: None

    def __call__(
        self,
        model: nn.Module,
        indices: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[dict[str, Any]]:
        """What the model, which is left in the mode it was in, finds on these pictures, as COCO's results have it."""
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
        """The same by the pictures' indices, a batch at a time; the caller sees to eval mode."""
        model = unwrap(model)  # processes may have different numbers of batches, and DDP's forward waits for the others
        normalise = Normalise(model, self.device)
        keys = [list(indices[first : first + self.batch]) for first in range(0, len(indices), self.batch)]
        for items, broken in read_ahead(EvaluationSamples(self.images), keys, list, self.workers, self.device):
            for one in self.log.add(broken):
                self.say(f"Left out of the evaluation, unreadable: {one}")
            if not items:
                continue
            with autocast():
                findings = model([normalise(picture) for picture, _ in items])
            found = {}
            for (picture, index), finding in zip(items, findings, strict=True):
                found[index] = coco_findings([finding], [self.images.image_id(index)], self.images.category_ids)
                self.watch(index, picture, finding)
            yield found


class Normalise:
    """Pictures, uint8 (3, H, W), on the device as the model wants them."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        wanted, self.device = pixels_of(model), device
        self.mean = torch.tensor(wanted.mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(wanted.std, device=device)[:, None, None] * 255

    def __call__(self, picture: Tensor) -> Tensor:
        return (picture.to(self.device, non_blocking=True).float() - self.mean) / self.std


def draw_finding(picture: Tensor, finding: Finding, classes: Sequence[str], least: float = 0.5) -> Image.Image:
    """The picture, uint8 (3, H, W), with the boxes, masks, names and scores of what was found with at least that score.

    >>> finding = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    >>> finding |= {"scores": torch.tensor([0.9]), "masks": torch.ones(1, 1, 64, 64)}
    >>> draw_finding(torch.zeros(3, 64, 64, dtype=torch.uint8), finding, ["ring"]).size
    (320, 320)
    """
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    times = -(-_SMALLEST_PICTURE // min(picture.shape[1:]))
    picture = picture.cpu().repeat_interleave(times, 1).repeat_interleave(times, 2)
    kept = finding["scores"].cpu() >= least
    if kept.any():
        labels = finding["labels"].cpu()[kept].tolist()
        scores = finding["scores"].cpu()[kept].tolist()
        colours = [_colour(label) for label in labels]
        masks = finding["masks"][:, 0].cpu()[kept] > 0.5
        masks = masks.repeat_interleave(times, 1).repeat_interleave(times, 2)
        captions = [f"{classes[label - 1]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
        for mask, colour in zip(masks, colours, strict=True):  # all at once, torchvision blackens where they overlap
            picture = draw_segmentation_masks(picture, mask, alpha=0.45, colors=[colour])
        boxes = finding["boxes"].float().cpu()[kept] * times
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


class PictureWriter:
    """Writes the pictures of a search into a folder, as NUMBER.png, NUMBER being COCO's."""

    def __init__(self, folder: str | Path, images: Detections, least: float = 0.5) -> None:
        self.folder, self.images, self.least = Path(folder), images, least

    def __call__(self, index: int, picture: Tensor, finding: Finding) -> None:
        with atomic_path(self.folder / f"{self.images.image_id(index):012d}.png") as path:
            draw_finding(picture, finding, self.images.classes, self.least).save(path, "PNG")


def _colour(label: int) -> tuple[int, int, int]:
    """A bright colour, unlike those of the labels next to it: hues a golden section apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.8, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
