"""Pictures or questions measured batch by batch: processes take turns with the batches, and none is measured twice.

A batch holds the same items whoever measures it and when, because what a model says of one may depend on those beside
it: they are padded to a common size. So an interrupted run, or one of several processes, ends with the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from vitfocus.core.progress import Progress
from vitfocus.robustness.request import Request
from vitfocus.robustness.runfolder import RunFolder, keeping

#: Goes through some places, whole batches of them, and yields a batch at a time what came of each, fit for json.
Measure = Callable[[Sequence[int]], Iterator[Mapping[int, Any]]]


def in_turns(
    asked: Request, folder: RunFolder | None, places: Sequence[int], batch_size: int, measures: Mapping[str, Measure]
) -> Generator[tuple[str, list[Any]], None, None]:
    """Each model's name and its outcomes in the order of `places`, on every process, one model after the other.

    What the folder holds is not measured again; what is new is kept there while it runs.

    >>> import torch
    >>> from vitfocus.core.processes import Processes
    >>> here = Processes(0, 1, torch.device("cpu"))
    >>> asked = Request({"square": torch.nn.Identity()}, None, "answers", here, progress=False)
    >>> dict(in_turns(asked, None, [1, 2, 5], 2, {"square": lambda some: ({place: place**2} for place in some)}))
    {'square': [1, 4, 25]}
    """
    processes = asked.processes
    kept = [_read(folder, _group(number)) if processes.first else {} for number in range(len(measures))]
    known = processes.agree([set(some) for some in kept])
    batches = [places[first : first + batch_size] for first in range(0, len(places), batch_size)]
    total, done = len(places) * len(measures), sum(map(len, known))
    opening = f"{asked.suite}, {total - done:,} image evaluations."
    with Progress(asked.suite, total, done, opening=opening, show=asked.progress) as progress:
        for number, (name, measure) in enumerate(measures.items()):
            left = [batch for batch in batches if not known[number].issuperset(batch)]
            mine = [place for batch in left[processes.rank :: processes.world] for place in batch]
            found, kept[number] = kept[number], {}
            with closing(_measured(folder, _group(number), measure, mine)) as new:  # closed: all of it is kept
                for outcomes in new:
                    found |= outcomes
                    progress.advance(len(outcomes) * processes.world, name)
            whole = {place: text for part in processes.gather(found) for place, text in part.items()}
            yield name, [json.loads(whole[place]) for place in places]


def _measured(
    folder: RunFolder | None, group: str, measure: Measure, places: Sequence[int]
) -> Generator[dict[int, str], None, None]:
    """The outcomes of these places as json, a batch at a time, kept in the folder now and then."""
    pending: dict[int, str] = {}

    def keep() -> None:
        if folder is not None and pending:
            lines = "\n".join(pending.values()).encode()
            positions = np.array(list(pending))
            folder.write_part(group, {"positions": positions, "outcomes": np.frombuffer(lines, np.uint8)})
        pending.clear()

    with keeping(keep) as now_and_then:
        for outcomes in measure(places) if places else ():
            texts = {place: json.dumps(outcome) for place, outcome in outcomes.items()}
            pending |= texts
            now_and_then()
            yield texts


def _read(folder: RunFolder | None, group: str) -> dict[int, str]:
    """What was kept of a model, as json."""
    found: dict[int, str] = {}
    for part in folder.read_parts(group) if folder is not None else ():
        lines = part["outcomes"].tobytes().decode().split("\n")
        found |= zip(part["positions"].tolist(), lines, strict=True)
    return found


def _group(number: int) -> str:
    """What a model's parts are called."""
    return f"model{number}"
