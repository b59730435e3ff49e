"""Reports: one HTML page about run folders (`report`), and a page to explore attention with (`explore`).

The page states the result first, then the evidence, and ends with where everything comes from. Each section is one
function `add_...`, which adds nothing if there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitfocus.core import __version__
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import confined
from vitfocus.report.attention import add_attention, add_gallery, is_gallery
from vitfocus.report.comparison import Estimate, MetricRow, compare_models, find_tests
from vitfocus.report.explorer import add_explorer, explore, load_explorer
from vitfocus.report.models import add_cost, add_training, add_treatments
from vitfocus.report.page import Page
from vitfocus.report.provenance import add_provenance
from vitfocus.report.runs import ReportModel, collect_models
from vitfocus.report.scores import add_robustness, add_scores
from vitfocus.report.summary import add_summary, insertions

__all__ = ["WrittenReport", "explore", "report"]

REPORT = "report.html"
_COLOURS = 7


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        path: The page.
        size: Its size in bytes.
        models: The names of the models, the baseline first.
        rows: Every metric it shows.
        insertions: A sentence for each model that is not judged because its treatments have not been trained.
    """

    path: Path
    size: int
    models: list[str]
    rows: list[MetricRow]
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


def _plain(value: Estimate) -> dict[str, Any]:
    found: dict[str, Any] = {"number": value.number}
    return found | ({"interval": list(value.interval)} if value.interval is not None else {})


@checked
def report(
    *runs: str | Path,
    out: str | Path | None = None,
    title: str | None = None,
    about: str = "",
    explorer: Any = None,
    gallery: bool | None = None,
) -> WrittenReport:
    """Write one self-contained page about run folders of train, evaluate and diagnose.

    The contents of all folders are collected model by model. The first model is the baseline that the others are
    compared with. Three or more models that were only diagnosed make a gallery instead: one sortable table with a row
    per model.

    Args:
        *runs: Run folders, or folders of run folders.
        out: The page's file. Default: report.html in the run's folder, or in the current folder for several runs.
        title: The page's heading. Default: the models' names.
        about: An introductory paragraph.
        explorer: The result of `explorer_data` for these models. Default: explorer data saved in the folders, if any.
        gallery: Whether to write a gallery. Default: if there are three or more models, each was diagnosed, and none
            was trained in these folders.

    Returns:
        The page's path and size, and the metrics it shows.

    Raises:
        VitfocusError: If no folder is given, one of them holds nothing to report on, or the page cannot be written.

    Example:
        >>> import tempfile, timm, torch, vitfocus as vf
        >>> folder = tempfile.mkdtemp()
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
        >>> _ = vf.diagnose(model, torch.rand(2, 3, 32, 32), name="tiny").save(folder)
        >>> vf.report(folder).models
        ['tiny']
    """
    if not runs:
        raise VitfocusError("A report needs runs: name at least one folder that train, evaluate or diagnose wrote.")
    models = collect_models(runs)
    target = Path(out) if out is not None else (Path(runs[0]) if len(runs) == 1 else Path()) / REPORT
    if out is not None and (target.is_dir() or str(out).endswith("/")):
        target = target / REPORT
    if target.is_file() and target.suffix.lower() not in (".html", ".htm"):
        raise VitfocusError(f"{target} exists and would be replaced; expected a folder, or a file that ends in .html.")
    if is_gallery(models) if gallery is None else gallery:
        page, rows = build_gallery(models, target, title, about)
        data = explorer
    else:
        page, rows = build_page(models, title, about)
        data = explorer if explorer is not None else load_explorer(models)
    if data is not None:
        add_explorer(page, data, target)
    with confined(target.parent) if out is None else nullcontext():  # a run folder may be untrusted
        page.write(target)
    return WrittenReport(target, target.stat().st_size, [model.name for model in models], rows, insertions(models))


def build_page(
    models: Sequence[ReportModel], title: str | None = None, about: str = ""
) -> tuple[Page, list[MetricRow]]:
    """The page and the metrics it shows."""
    names = [model.name for model in models]
    if title is None:
        title = " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    page = _new_page(title, about)
    colours = {name: index % _COLOURS for index, name in enumerate(names)}
    tests = find_tests(models)
    rows = compare_models(models, tests)
    add_summary(page, models, tests, rows, colours)
    add_scores(page, models, rows)
    add_robustness(page, tests, colours)
    add_attention(page, models, colours)
    add_cost(page, models)
    add_treatments(page, models)
    add_training(page, models, colours)
    add_provenance(page, models, tests)
    return page, rows


def build_gallery(
    models: Sequence[ReportModel], target: Path, title: str | None = None, about: str = ""
) -> tuple[Page, list[MetricRow]]:
    """The gallery that will be written to `target`, and the metrics of its models."""
    if not any(model.diagnoses for model in models):
        raise VitfocusError("A gallery shows diagnoses, and these folders hold none: run vitfocus diagnose first.")
    tests = find_tests(models)
    page = _new_page(title if title is not None else "Where vision transformers look", about)
    add_gallery(page, models, target)
    add_provenance(page, models, tests)
    return page, compare_models(models, tests)


def _new_page(title: str, about: str) -> Page:
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = Page(title, f"Written by vitfocus {__version__} on {stamp}.")
    if about:
        page.text(about)
    return page
