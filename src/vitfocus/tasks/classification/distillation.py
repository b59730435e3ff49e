"""Distillation as in DeiT: a frozen teacher judges the very images the student sees, mixed and erased as they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, pixels_of
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.modules import logits_of
from vitfocus.tasks.building import start_from
from vitfocus.treatments.save_load import create_model, load

if TYPE_CHECKING:
    from vitfocus.recipes.settings import Distill


class Teacher(nn.Module):
    """Any timm model, or one that vitfocus saved in a folder, in eval mode; takes images normalised for the student."""

    def __init__(self, section: Distill, classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        saved = Path(section.teacher).is_dir()
        if not saved and not section.pretrained and not section.weights:
            raise VitfocusError(
                f"The teacher {section.teacher} has no weights: set distill.weights to a file, "
                "distill.pretrained=true to let timm fetch them, or name a folder that vitfocus.save wrote."
            )
        self.section = section
        self.net = (
            load(section.teacher)
            if saved
            else create_model(section.teacher, pretrained=section.pretrained, num_classes=classes).eval()
        )
        if section.weights:
            start_from(self.net, section.weights)
        self.net.requires_grad_(False)
        own_mean, own_std, _ = pixels_of(self.net)
        scale = torch.tensor(std) / torch.tensor(own_std)
        shift = (torch.tensor(mean) - torch.tensor(own_mean)) / torch.tensor(own_std)
        self.register_buffer("scale", scale[:, None, None], persistent=False)
        self.register_buffer("shift", shift[:, None, None], persistent=False)
        self.size = self._fixed_size()
        self._try(classes)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The teacher's logits."""
        images = images * self.scale + self.shift  # type: ignore[operator]
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return logits_of(self.net(images))

    def _try(self, classes: int) -> None:
        """Show the teacher one image, so that one which judges something else is refused before training begins."""
        try:
            shape = tuple(self(torch.zeros(1, 3, *pixels_of(self.net).size)).shape)
        except Exception as error:  # whatever a library raises for images that it does not expect
            raise VitfocusError(f"The teacher {self.section.teacher} takes no images: {reason(error)}.") from None
        if shape != (1, classes):
            said = f"{shape[1]} classes" if len(shape) == 2 else f"an output of shape {shape}"
            raise VitfocusError(f"The teacher {self.section.teacher} gives {said}, and the student learns {classes}.")

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Hard: cross-entropy with the teacher's decision. Soft: KL divergence at the temperature, times its square."""
        if self.section.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(1))
        heat = self.section.temperature
        targets = F.log_softmax(teacher.float() / heat, 1)
        return F.kl_div(F.log_softmax(student / heat, 1), targets, reduction="batchmean", log_target=True) * heat**2

    def _fixed_size(self) -> tuple[int, int] | None:
        """The one size a transformer takes; a convolutional network takes any."""
        try:
            return anatomy(self.net).build_size
        except VitfocusError:
            return None
