"""`report`: from run folders to one page that answers, in order, what a reader asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitfocus.anatomy import insertion_sentence, insertions_sentence
from vitfocus.core import __version__
from vitfocus.core.errors import VitfocusError
from vitfocus.report import verdict
from vitfocus.report.page import Page
from vitfocus.report.sections.attends import add_attention
from vitfocus.report.sections.better import add_better
from vitfocus.report.sections.compared import add_compared
from vitfocus.report.sections.costs import add_costs
from vitfocus.report.sections.curves import add_curves
from vitfocus.report.sections.robust import add_robustness
from vitfocus.report.sections.treated import add_treated
from vitfocus.report.subjects import Subject, gather

REPORT = "report.html"
_COLOURS = 7


@dataclass(frozen=True)
class Written:
    """A report that was written: where, how large, and what it says of whom.

    `insertions` has a sentence for each model that was not judged, as its treatments were not trained yet.
    """

    path: Path
    size: int
    models: list[str]
    rows: list[verdict.Row]
    insertions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return {
            "report": str(self.path),
            "bytes": self.size,
            "models": self.models,
            "insertions": self.insertions,
            "scores": [
                {
                    "test": row.test,
                    "measure": row.measure,
                    "unit": row.unit,
                    "values": {name: _plain(value) for name, value in row.values.items()},
                    "differences": {name: _plain(value) for name, value in row.differences.items()},
                }
                for row in self.rows
            ],
        }


def _plain(value: verdict.Value | verdict.Difference) -> dict[str, Any]:
    found: dict[str, Any] = {"number": value.number}
    return found | ({"interval": list(value.interval)} if value.interval is not None else {})


def report(
    *runs: str | Path,
    out: str | Path | None = None,
    title: str | None = None,
    about: str = "",
    explorer: Any = None,
) -> Written:
    """Write one self-contained page about some run folders of train, evaluate and diagnose.

    The evidence of all folders is brought together model by model; the first model is what the others are compared
    with. `out` is the page's file (default: report.html in the run's folder, or here for several); `about` is a
    paragraph to begin with. `explorer` is what `explorer_data` gave for these models; without it, what the folders hold
    of that kind is shown.
    """
    if not runs:
        raise VitfocusError("A report is about runs: name at least one folder that train, evaluate or diagnose wrote.")
    subjects = gather(runs)
    target = Path(out) if out is not None else (Path(runs[0]) if len(runs) == 1 else Path()) / REPORT
    if target.is_dir() or str(out).endswith("/"):
        target = target / REPORT
    page, rows = build(subjects, title, about)
    from vitfocus.report.explorer import add_explorer, stored

    data = explorer if explorer is not None else stored(subjects)
    if data is not None:
        add_explorer(page, data)
    page.write(target)
    names = [subject.name for subject in subjects]
    return Written(target, target.stat().st_size, names, rows, _insertions(subjects))


def _insertions(subjects: Sequence[Subject]) -> dict[str, str]:
    """A sentence for each model whose treatments were inserted after its weights were last trained."""
    return {one.name: insertion_sentence(one.inserted, one.name) for one in subjects if one.inserted}


def build(subjects: Sequence[Subject], title: str | None = None, about: str = "") -> tuple[Page, list[verdict.Row]]:
    """The page and the scores it shows."""
    names = [subject.name for subject in subjects]
    if title is None:
        title = names[0] if len(names) == 1 else f"{names[0]} and {names[1]}"
        title += f" and {len(names) - 2} more" if len(names) > 2 else ""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = Page(title, f"A report by vitfocus {__version__}, written {stamp}.")
    if about:
        page.text(about)
    if sentence := insertions_sentence(_insertions(subjects)):
        page.text(sentence)
    colours = {name: index % _COLOURS for index, name in enumerate(names)}
    taken = verdict.tests(subjects)
    rows = verdict.rows(subjects, taken)
    add_compared(page, subjects, taken)
    add_better(page, subjects, rows)
    add_curves(page, subjects, colours)
    add_robustness(page, taken, colours)
    add_attention(page, subjects, colours)
    add_costs(page, subjects)
    add_treated(page, subjects)
    return page, rows
