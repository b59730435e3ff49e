"""Timing several things by turns: each gets ready in a process of its own, then one at a time has the device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

#: Gets ready, and returns what there is to say of it and a function from a number of repeats to seconds of one.
Prepare = Callable[..., tuple[Any, Callable[[int], float]]]


class Turns:
    """`prepare(*arguments)` in a process for every name; `said` holds those that got ready, in order."""

    def __init__(self, prepare: Prepare, cases: Mapping[str, tuple[Any, ...]]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes, self.said = {}, [], {}
        for name, arguments in cases.items():
            self._pipes[name], theirs = spawn.Pipe()
            self._processes.append(spawn.Process(target=_serve, args=(prepare, arguments, theirs)))
            self._processes[-1].start()
            theirs.close()
        for name, pipe in self._pipes.items():
            try:
                ready, said = pipe.recv()
            except EOFError:
                ready, said = False, "its process ended"
            if ready:
                self.said[name] = said
            else:
                print(f"{name}: {said}", flush=True)

    def seconds(self, name: str, repeats: int) -> float:
        """Time one of them, while the others wait."""
        self._pipes[name].send(repeats)
        taken: float = self._pipes[name].recv()
        return taken

    def close(self) -> None:
        """Let all processes end."""
        for name in self.said:
            self._pipes[name].send(0)
        for process in self._processes:
            process.join()


def _serve(prepare: Prepare, arguments: tuple[Any, ...], pipe: Any) -> None:
    try:
        said, seconds = prepare(*arguments)
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        return
    pipe.send((True, said))
    while repeats := pipe.recv():
        pipe.send(seconds(repeats))
