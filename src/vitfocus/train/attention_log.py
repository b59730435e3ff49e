"""Attention during training: readings by layer at every evaluation, and a sentence if it collapses or stands still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vitfocus.anatomy import anatomy
from vitfocus.attention.diagnosis import Diagnosis, diagnose
from vitfocus.core.errors import VitfocusError
from vitfocus.core.tables import ranges
from vitfocus.tasks.base import Task

#: Validation images that are read. The readings are means over images, heads and rows, so a few images are enough.
IMAGES = 32
#: A layer has collapsed if its rows have at most this share of the largest entropy, ...
NARROW = 0.5
#: ... and the most attended 5 % of the tokens receive at least this share of all attention.
CONCENTRATED = 0.5
#: Attention that has collapsed in this share of the layers deserves a sentence.
LAYERS = 1 / 3
#: Attention stands still if no layer's share of the largest entropy moves by more than this between two evaluations.
STILL = 0.002


class AttentionLog:
    """Reads a model's attention on the task's first validation images. Rows go to metrics.jsonl."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.images: Any = None
        self.readable = _is_readable(model)
        self._before: dict[str, Any] | None = None
        self._moving = False  # whether it changed between the last two rows

    def row(self, model: nn.Module, step: int, epoch: float) -> dict[str, Any] | None:
        """The readings by layer; None for a model without attention that can be read."""
        if self.readable and self.images is None:
            self.images = self.task.sample_images(IMAGES)
            self.readable = self.images is not None
        if not self.readable:
            return None
        with torch.compiler.set_stance("force_eager"):
            return {"kind": "attention", "step": step, "epoch": epoch, **by_layer(diagnose(model, self.images))}

    def sentence(self, row: dict[str, Any], rate: float) -> str:
        """What a new row gives reason to say, if anything; `rate` is the learning rate as a share of its peak."""
        before, self._before = self._before, row
        moved, self._moving = self._moving, bool(before) and not _is_still(row, before)
        if collapsed_layers(row) and not (before and collapsed_layers(before)):
            return (
                f"{describe_collapse(row)} A lower optimiser.lr or a longer warm-up may help; vitfocus diagnose shows "
                "the maps."
            )
        if moved and not self._moving and rate > 0.1:
            return (
                "Attention has stopped changing: since the last evaluation no layer's entropy moved by more than "
                f"{STILL:.1%} of its maximum, although the learning rate is still {rate:.0%} of its peak."
            )
        return ""


def by_layer(diagnosis: Diagnosis) -> dict[str, list[Any]]:
    """What is logged of a diagnosis: lists with one value per layer."""
    rows = [row for row in diagnosis.rows if "overfocus" in row]
    return {
        "layer": [row["layer"] for row in rows],
        "entropy": [round(row["entropy"], 4) for row in rows],
        "entropy_share": [round(row["entropy"] / row["entropy_bound"], 4) for row in rows],
        "overfocus": [round(row["overfocus"], 4) for row in rows],
    }


def describe_collapse(row: Mapping[str, Any]) -> str:
    """Where attention has collapsed, in a sentence; empty if it has not.

    >>> describe_collapse({"layer": [0, 1], "entropy_share": [0.9, 0.3], "overfocus": [0.1, 0.7]}).partition(":")[0]
    'Attention has collapsed in 1 of 2 layers (1)'
    """
    collapsed = collapsed_layers(row)
    if not collapsed:
        return ""
    shares, tops = ([row[key][row["layer"].index(one)] for one in collapsed] for key in ("entropy_share", "overfocus"))
    return (
        f"Attention has collapsed in {len(collapsed)} of {len(row['layer'])} layers ({', '.join(ranges(collapsed))}): "
        f"its entropy is {_percent(shares)} of the maximum, and 5 % of the tokens receive {_percent(tops)} of it."
    )


def _percent(values: Sequence[float]) -> str:
    low, high = f"{100 * min(values):.0f}", f"{100 * max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def collapsed_layers(row: Mapping[str, Any]) -> list[int]:
    """The layers whose attention has collapsed, if they are at least a third of all.

    >>> collapsed_layers({"layer": [0, 1, 2], "entropy_share": [0.9, 0.3, 0.8], "overfocus": [0.1, 0.7, 0.2]})
    [1]
    """
    values = zip(row["layer"], row["entropy_share"], row["overfocus"], strict=True)
    found = [layer for layer, share, top in values if share <= NARROW and top >= CONCENTRATED]
    return found if len(found) >= LAYERS * len(row["layer"]) else []


def _is_still(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    before = before or row
    changes = [abs(a - b) for a, b in zip(row["entropy_share"], before["entropy_share"], strict=True)]
    return bool(changes) and max(changes) <= STILL


def _is_readable(model: nn.Module) -> bool:
    try:
        anatomy(model)
    except VitfocusError:
        return False
    return not any(hasattr(parameter, "full_tensor") for parameter in model.parameters())  # FSDP reads all together
