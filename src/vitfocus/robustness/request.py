"""What a suite that measures by itself is asked: which models, on what, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfocus.core.processes import Processes
from vitfocus.robustness.pixels import PRECISIONS
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.runfolder import RunFolder, claimed


@dataclass(frozen=True)
class Request:
    """Models by name and what is common to all such suites; a suite's own options come beside it.

    >>> asked = Request({"model": nn.Identity()}, "shapes", "detection", Processes(0, 1, torch.device("cpu")))
    >>> asked.first_model, asked.workers
    (Identity(), 0)
    """

    models: Mapping[str, nn.Module]
    data: Any
    suite: str
    processes: Processes
    batch_size: int | None = None
    limit: int | None = None
    seed: int = 0
    out: str | Path | None = None
    resume: bool = False
    workers: int = 0
    precision: str = "float32"
    progress: bool = True

    @property
    def device(self) -> torch.device:
        """Where this process works."""
        return self.processes.device

    @property
    def first_model(self) -> nn.Module:
        """The one that says what the options leave open."""
        return next(iter(self.models.values()))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the models run in."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, PRECISIONS[self.precision])

    @contextmanager
    def claimed(self, fingerprint: dict[str, Any]) -> Iterator[RunFolder | None]:
        """The run's folder, where one was named, for as long as it is measured.

        It is given up again where the run fails before anything was kept.
        """
        folder = claimed(self.out, fingerprint, self.resume, self.processes)
        try:
            yield folder
        except BaseException:
            if folder is not None and self.processes.first:
                folder.release()
            raise

    def stored(self, folder: RunFolder | None) -> Scores | None:
        """The scores of a run that is finished already; None where there is something to measure."""
        if folder is None or not self.processes.agree(folder.finished):
            return None
        return load_scores(folder.folder)

    def kept(self, scores: Scores) -> Scores:
        """The same scores, written by the first process to the folder where one was named."""
        if self.out is not None and self.processes.first:
            scores.save(self.out)
        return scores
