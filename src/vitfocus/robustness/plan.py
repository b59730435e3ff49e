"""A suite laid out before it is run: which conditions, on which images, by which protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitfocus.robustness.cells import Cell
from vitfocus.robustness.sources import Source

Columns = dict[str, npt.NDArray[Any]]  # one value an image, in order of position
Samples = dict[str, dict[str, Columns]]  # cell -> model -> columns
Summary = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Conditions that share their images: each batch is read once and feeds every cell."""

    name: str
    source: Source
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Plan:
    """What a suite will do: its groups, what its fingerprint says, and how one model's samples become numbers."""

    groups: tuple[Group, ...]
    protocol: dict[str, Any]
    summarise: Callable[[dict[str, Columns], int], Summary]
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> list[str]:
        """The names of all conditions, in order."""
        return [cell.name for group in self.groups for cell in group.cells]

    @property
    def steps(self) -> int | None:
        """How many (image, condition) pairs there are, where that is known."""
        counts = [group.source.count for group in self.groups]
        if any(count is None for count in counts):
            return None
        return sum((group.source.count or 0) * len(group.cells) for group in self.groups)


def in_order(positions: npt.NDArray[np.int64], columns: Columns) -> Columns:
    """Columns sorted by position."""
    order = np.argsort(positions, kind="stable")
    return {name: values[order] for name, values in columns.items()}
