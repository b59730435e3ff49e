"""Working in one process or several; accelerate is imported only if a launcher has started several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitfocus.core.environment import usable_device
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import lock_folder

Content = TypeVar("Content")


@dataclass(frozen=True)
class Processes:
    """This process among its peers, and the device it works on."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def gather(self, content: Content) -> list[Content]:
        """Every process's content, in order of rank, on every process."""
        if self.world == 1:
            return [content]
        from accelerate.utils import gather_object

        return list(gather_object([content]))

    def agree(self, content: Content) -> Content:
        """The first process's content, on every process."""
        if self.world == 1:
            return content
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([content])[0]

    @contextmanager
    def lock(self, folder: str | Path) -> Iterator[None]:
        """Keep other runs out of a folder: the first process holds the lock, and all fail where it is refused."""
        with ExitStack() as stack:
            problem = None
            if self.first:
                try:
                    stack.enter_context(lock_folder(folder))
                except VitfocusError as error:
                    problem = str(error)
            problem = self.agree(problem)
            if problem is not None:
                raise VitfocusError(problem)
            yield


def join_processes(device: str | torch.device | None = None) -> Processes:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    wanted = usable_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(0, 1, wanted)
    try:
        from accelerate import PartialState
    except ImportError:
        raise VitfocusError("Several processes work together through accelerate: pip install accelerate.") from None
    options: dict[str, Any] = {"cpu": True} if device is not None and wanted.type == "cpu" else {}
    state = PartialState(**options)
    return Processes(state.process_index, state.num_processes, state.device)


def is_main_process() -> bool:
    """Whether this process prints and writes files; known from the launcher's environment, before any has joined."""
    return int(os.environ.get("RANK", "0")) == 0
