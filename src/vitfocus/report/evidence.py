"""What lies in run folders: trainings, evaluations and diagnoses, found and read wherever they are."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core.contents import check_contents
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.report.card import Card, read_cards
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.runfolder import RESULTS, read_json
from vitfocus.train.results import SHAPE as TRAINED

DIAGNOSIS, METRICS, RECIPE, EXPLORER = "diagnosis.json", "metrics.jsonl", "config.toml", "explorer.json"
DATA = "data.json"

#: Folders inside a run that hold weights and half-done work, never another run.
_NEVER_RUNS = frozenset({"model", "best", "checkpoints", "parts", "tensorboard"})
_DEPTH = 4


@dataclass(frozen=True)
class Training:
    """A training run: its recipe, the rows of metrics.jsonl, and results.json once it is finished."""

    folder: Path
    recipe: dict[str, Any]
    rows: list[dict[str, Any]]
    results: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        return bool(self.results.get("finished"))

    @property
    def spec(self) -> str:
        """The model and its treatments as text."""
        return str(self.results.get("spec") or self.recipe.get("model", {}).get("spec") or "")


@dataclass(frozen=True)
class Found:
    """One folder's evidence: any of a training, scores and a diagnosis, with the cards of the models in it.

    `data` says on which images a diagnosis was made, if it is known; `within` is the training run in whose folder this
    one lies, if it does.
    """

    folder: Path
    training: Training | None = None
    scores: Scores | None = None
    diagnosis: Diagnosis | None = None
    cards: dict[str, Card] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    within: Path | None = None


def note_data(folder: str | Path, source: str, digest: str) -> None:
    """Keep beside a diagnosis which images it was made on."""
    write_text(Path(folder) / DATA, json.dumps({"source": source, "digest": digest}, indent=1) + "\n")


def find_evidence(folder: str | Path) -> list[Found]:
    """Everything readable in a run's folder and the folders in it; refuses one in which there is nothing."""
    folder = Path(folder)
    if folder.is_file():
        raise VitfocusError(f"{folder} is a file; a run is a folder, such as {folder.absolute().parent}.")
    if not folder.is_dir():
        raise VitfocusError(f"There is no folder {folder}; name one that train, evaluate or diagnose wrote.")
    found = list(_walk(folder, None, _DEPTH))
    if not found:
        unfinished = (folder / "protocol.json").is_file() or (folder / "checkpoints").is_dir()
        hint = (
            "its run has not measured anything yet" if unfinished else f"expected {RESULTS}, {METRICS} or {DIAGNOSIS}"
        )
        raise VitfocusError(f"{folder} holds nothing to report on: {hint}.")
    return found


def _walk(folder: Path, within: Path | None, depth: int) -> Iterator[Found]:
    found = _read(folder, within)
    if found is not None:
        yield found
        within = folder if found.training is not None else within
    if depth:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in _NEVER_RUNS):
            if not inner.name.startswith("."):
                yield from _walk(inner, within, depth - 1)


def _read(folder: Path, within: Path | None) -> Found | None:
    results = read_json(folder / RESULTS) if (folder / RESULTS).is_file() else {}
    scores = load_scores(folder) if not results.keys().isdisjoint(("suite", "models", "fingerprint")) else None
    if scores is None:
        check_contents(folder / RESULTS, results, TRAINED, "vitfocus train")
    training = None
    if (folder / METRICS).is_file() or (results and scores is None and (folder / RECIPE).is_file()):
        training = Training(folder, _recipe(folder), read_rows(folder / METRICS), results if scores is None else {})
        if not training.rows and not training.results:
            training = None
    diagnosis = Diagnosis.load(folder) if (folder / DIAGNOSIS).is_file() else None
    if training is None and scores is None and diagnosis is None:
        return None
    data = read_json(folder / DATA) if (folder / DATA).is_file() else {}
    check_contents(folder / DATA, data, {"source?": (str, None), "digest?": (str, None)}, "vitfocus diagnose")
    return Found(folder, training, scores, diagnosis, read_cards(folder), data, within)


def _recipe(folder: Path) -> dict[str, Any]:
    try:
        recipe = tomllib.loads((folder / RECIPE).read_text("utf-8")) if (folder / RECIPE).is_file() else {}
    except (OSError, ValueError) as error:
        raise VitfocusError(f"{folder / RECIPE} cannot be read: {error}.") from None
    shape = {"name?": str, "model?": {"spec?": str}, "data?": dict, "engine?": dict}
    check_contents(folder / RECIPE, recipe, shape, "vitfocus train")
    return recipe


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a crash may have left half of one at the end."""
    if not path.is_file():
        return []
    try:
        text = path.read_text("utf-8")
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise VitfocusError(f"{path} cannot be read: {error}.") from None
    kept = [row for row in rows if isinstance(row, dict) and "step" in row]
    check_contents(path, kept, [{"step": int, "epoch?": float, "kind?": str}], "vitfocus train")
    return kept
