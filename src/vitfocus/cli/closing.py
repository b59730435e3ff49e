"""How a run ends: what its model is made of is noted, and report.html is written into its folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

#: Folders that hold a run's weights; the run itself is the one above.
_WEIGHTS = frozenset({"model", "best"})


def model_label(name: str) -> str:
    """What tables call a model that was named by a spec or a folder: for runs/a/model that is a, not model.

    >>> model_label("deit_tiny_patch16_224+cb"), model_label("runs/a/model"), model_label("runs/a/best")
    ('deit_tiny_patch16_224+cb', 'a', 'a (best)')
    """
    path = Path(name)
    if path.name not in _WEIGHTS or not path.resolve().parent.name:
        return path.name
    run = path.resolve().parent.name
    return run if path.name == "model" else f"{run} ({path.name})"


def close_run(folder: str | Path, models: Mapping[str, nn.Module] | None = None) -> Path | None:
    """Write the cards of the run's models, where they are at hand, and its report; say where it is.

    A run that took days is not spoilt by a report that fails: what went wrong is said, and the run has ended well.
    """
    from vitfocus.report import report
    from vitfocus.report.card import write_cards

    try:
        if models:
            write_cards(folder, models)
        written = report(folder)
    except Exception as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return None
    print(f"Report: {written.path}", file=sys.stderr)
    return written.path
