"""Run folders: read what train, evaluate and diagnose wrote, and group it by model.

A model is identified by the digest of its weights and by its treatments (some add no weights). A training run, an
evaluation in a second folder and a diagnosis in a third therefore become one column of the report. Files without a
digest are matched by their folder, or by the model's name.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core.environment import default_device
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.records import Count, OpenDict, convert, parse_json, read_json, read_text, read_toml, write_json
from vitfocus.core.tables import unique_label
from vitfocus.report.model_card import CARD, Card, Cards, make_card, read_cards
from vitfocus.robustness.pixel_model import tensors_digest
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.run_folder import RESULTS
from vitfocus.train.log import TrainingResults
from vitfocus.treatments.hub import SavedConfig

DIAGNOSIS, METRICS, RECIPE, DATA = "diagnosis.json", "metrics.jsonl", "config.toml", "data.json"
WEIGHTS = "model.safetensors"

#: Subfolders of a run with weights and unfinished work, which are not searched.
_SKIPPED_FOLDERS = frozenset({"model", "best", "checkpoints", "parts", "tensorboard"})
_MAX_DEPTH = 4


class MetricsRow(OpenDict):
    """A row of metrics.jsonl."""

    class fields(msgspec.Struct):  # noqa: D106
        step: Count
        epoch: float = 0.0
        kind: str = ""


class _ModelSection(OpenDict):
    class fields(msgspec.Struct):
        spec: str = ""


class _RecipeDict(OpenDict):
    class fields(msgspec.Struct):
        name: str = ""
        model: _ModelSection = msgspec.field(default_factory=_ModelSection)
        data: dict[str, Any] = {}
        engine: dict[str, Any] = {}


class DiagnosedData(msgspec.Struct):
    """data.json: which images a diagnosis was made on."""

    source: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Training:
    """A training run: its recipe, the rows of metrics.jsonl, and results.json once it is finished."""

    folder: Path
    recipe: dict[str, Any]
    rows: list[dict[str, Any]]
    results: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether training has finished."""
        return bool(self.results.get("finished"))

    @property
    def spec(self) -> str:
        """The model and its treatments as a spec."""
        return str(self.results.get("spec") or self.recipe.get("model", {}).get("spec") or "")


@dataclass(frozen=True)
class RunResults:
    """The contents of one folder: a training, scores and a diagnosis, if any, and the cards of its models.

    `data` says which images a diagnosis was made on, if known. `parent` is the training run that contains the folder.
    """

    folder: Path
    training: Training | None = None
    scores: Scores | None = None
    diagnosis: Diagnosis | None = None
    cards: dict[str, Card] = field(default_factory=dict)
    data: DiagnosedData = field(default_factory=DiagnosedData)
    parent: Path | None = None


class Identity(NamedTuple):
    """Two results belong to one model if their identities are equal."""

    digest: str
    treatments: str


@dataclass
class ReportModel:
    """One model and its results from all run folders.

    `scores` hold this model alone; `data` has one entry per diagnosis.
    """

    name: str
    identity: Identity | None = None
    training: Training | None = None
    scores: list[Scores] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    card: Card | None = None
    data: list[DiagnosedData] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    full_name: str = ""

    @property
    def model_folder(self) -> Path | None:
        """The folder the trained model can be loaded from, if there is one."""
        folder = self.training.folder / "model" if self.training is not None else None
        return folder if folder is not None and (folder / WEIGHTS).is_file() else None

    @property
    def treatments(self) -> list[str] | None:
        """The specs of its treatments; None if they are not known."""
        if self.card is not None:
            return list(self.card.treatments)
        if self.training is not None and self.training.spec:
            from vitfocus.treatments.spec import split_spec

            try:
                return [str(treatment) for treatment in split_spec(self.training.spec)[1]]
            except VitfocusError:
                return None
        for described in self._fingerprints():
            if (text := described.get("treatments")) is not None:
                return [text] if text else []
        return None

    @property
    def inserted(self) -> str:
        """The treatments inserted after the weights were last trained, according to any of its files."""
        said = [self.card.inserted if self.card is not None else ""]
        said += [one.get("inserted", "") for one in self._fingerprints()]
        return next(filter(None, (*said, *(diagnosis.inserted for diagnosis in self.diagnoses))), "")

    def _fingerprints(self) -> list[dict[str, Any]]:
        """How each evaluation describes the model."""
        return [one.fingerprint.get("models", {}).get(next(iter(one.models)), {}) for one in self.scores]


def short_path(folder: Path) -> str:
    """The last two parts of a path: enough to recognise a run without exposing the machine's folders."""
    return "/".join(folder.resolve().parts[-2:])


def write_data_source(folder: str | Path, source: str, digest: str) -> None:
    """Record beside a diagnosis which images it was made on."""
    write_text(Path(folder) / DATA, json.dumps({"source": source, "digest": digest}, indent=1) + "\n")


def find_runs(folder: str | Path) -> list[RunResults]:
    """The runs in a folder and its subfolders.

    Raises:
        VitfocusError: If there is no such folder, or nothing in it to report on.
    """
    folder = Path(folder)
    if folder.is_file():
        raise VitfocusError(f"{folder} is a file; a run is a folder, such as {folder.absolute().parent}.")
    if not folder.is_dir():
        raise VitfocusError(f"There is no folder {folder}; name one that train, evaluate or diagnose wrote.")
    found = list(_walk(folder, None, _MAX_DEPTH))
    if not found:
        unfinished = (folder / "protocol.json").is_file() or (folder / "checkpoints").is_dir()
        hint = "its run has no results yet" if unfinished else f"expected {RESULTS}, {METRICS} or {DIAGNOSIS}"
        raise VitfocusError(f"{folder} holds nothing to report on: {hint}.")
    return found


def _walk(folder: Path, parent: Path | None, depth: int) -> Iterator[RunResults]:
    found = _read(folder, parent)
    if found is not None:
        yield found
        parent = folder if found.training is not None else parent
    if depth:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in _SKIPPED_FOLDERS):
            if not inner.name.startswith("."):
                yield from _walk(inner, parent, depth - 1)


def _read(folder: Path, parent: Path | None) -> RunResults | None:
    results = read_json(folder / RESULTS, dict[str, Any]) if (folder / RESULTS).is_file() else {}
    scores = load_scores(folder) if not results.keys().isdisjoint(("suite", "models", "fingerprint")) else None
    if scores is None:
        results = convert(results, TrainingResults, folder / RESULTS, writer="vitfocus train")
    training = None
    if (folder / METRICS).is_file() or (results and scores is None and (folder / RECIPE).is_file()):
        training = Training(folder, _read_recipe(folder), read_metrics(folder), results if scores is None else {})
        if not training.rows and not training.results:
            training = None
    diagnosis = Diagnosis.load(folder) if (folder / DIAGNOSIS).is_file() else None
    if training is None and scores is None and diagnosis is None:
        return None
    data = DiagnosedData()
    if (folder / DATA).is_file():
        data = read_json(folder / DATA, DiagnosedData, writer="vitfocus diagnose")
    return RunResults(folder, training, scores, diagnosis, read_cards(folder), data, parent)


def _read_recipe(folder: Path) -> dict[str, Any]:
    recipe = read_toml(folder / RECIPE) if (folder / RECIPE).is_file() else {}
    return convert(recipe, _RecipeDict, folder / RECIPE, writer="vitfocus train")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; an incomplete last line, as a crash leaves it, is dropped."""
    path = folder / METRICS
    if not path.is_file():
        return []
    text = read_text(path)
    rows = [parse_json(line, path) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    kept = [row for row in rows if isinstance(row, dict) and "step" in row]
    return [*convert(kept, list[MetricsRow], path, writer="vitfocus train")]


def collect_models(runs: Iterable[str | Path], make_cards: bool = True) -> list[ReportModel]:
    """The models of some run folders, in the order given; within one folder, untreated models come first.

    With `make_cards`, a trained model that has no card yet is loaded and described, and its card is saved.
    """
    found: dict[Path, tuple[int, RunResults]] = {}
    for place, run in enumerate(dict.fromkeys(Path(run) for run in runs)):
        for one in find_runs(run):
            folder = one.folder.resolve()
            if folder not in found:
                found[folder] = (place, one)
            elif found[folder][1].parent is None:  # the folder was named before the run that contains it
                found[folder] = (found[folder][0], one)
    models: list[ReportModel] = []
    for _, one in sorted(found.values(), key=lambda pair: pair[1].training is None):
        _assign(one, models)
    first = {id(model): min(found[folder.resolve()][0] for folder in model.folders) for model in models}
    models.sort(key=lambda model: (first[id(model)], bool(model.treatments)))
    if make_cards:
        for model in models:
            _make_missing_card(model)
    _make_names_unique(models)
    _shorten_names(models)
    return models


def _assign(found: RunResults, models: list[ReportModel]) -> None:
    """Add a folder's contents to the models they belong to, creating models as needed."""
    if found.training is not None:
        name = found.folder.resolve().name or str(found.folder)
        model = ReportModel(name, saved_identity(found.folder / "model"), found.training)
        cards = [card for card in found.cards.values() if _card_identity(card) == model.identity]
        model.card = cards[0] if cards and model.identity else None
        model.folders.append(found.folder)
        models.append(model)
    if found.scores is not None:
        for name in found.scores.models:
            alone = found.scores.only(name)
            described = alone.fingerprint.get("models", {}).get(name, {})
            identity = _identity(described.get("digest"), described.get("treatments", ""))
            model = _matching_model(name, identity, found, models, len(found.scores.models) == 1)
            model.scores.append(alone)
            _add_folder(model, found, name)
    if found.diagnosis is not None:
        cards = list(found.cards.values())
        identity = _card_identity(cards[0]) if len(cards) == 1 else None
        model = _matching_model(found.diagnosis.model, identity, found, models, True)
        model.diagnoses.append(found.diagnosis)
        model.data.append(found.data)
        _add_folder(model, found, found.diagnosis.model)


def _add_folder(model: ReportModel, found: RunResults, name: str) -> None:
    card = found.cards.get(name)
    if model.card is None and card is not None and model.identity in (None, _card_identity(card)):
        model.card = card
    if found.folder not in model.folders:
        model.folders.append(found.folder)


def _matching_model(
    name: str, identity: Identity | None, found: RunResults, models: list[ReportModel], alone: bool
) -> ReportModel:
    """The model that results under this name and identity belong to; a new one if there is none."""
    trained = [(model, model.training.folder) for model in models if model.training is not None]
    if identity is not None:
        for model in models:
            if model.identity == identity:
                return model
        for model, folder in trained:
            if saved_identity(folder / "best") == identity:
                models.append(ReportModel(f"{model.name} (best)", identity))
                return models[-1]
    elif alone and found.parent is not None:
        for model, folder in trained:
            if folder == found.parent:
                return model
    for model in models:
        if model.name == name and (identity is None or model.identity is None):
            settings = [setting_of(one) for one in model.diagnoses if model.training is None]
            if found.diagnosis is not None and setting_of(found.diagnosis) in settings:
                continue  # two diagnoses with one name and one setting are of two models
            model.identity = model.identity or identity
            return model
    models.append(ReportModel(name, identity))
    return models[-1]


def setting_of(diagnosis: Diagnosis) -> tuple[int, tuple[int, int], str | None]:
    """What must agree for two diagnoses to be compared: the number of images, their size, and the corruption."""
    return diagnosis.images, diagnosis.size, diagnosis.against


def saved_identity(folder: Path) -> Identity | None:
    """The identity of a saved model, its digest computed as an evaluation does; None if it cannot be read."""
    if not (folder / WEIGHTS).is_file():
        return None
    try:
        treatments = read_json(folder / "config.json", SavedConfig).treatments
        return Identity(tensors_digest(load_file(folder / WEIGHTS)), "+".join(treatments))
    except (SafetensorError, OSError, VitfocusError):
        return None


def _card_identity(card: Card) -> Identity | None:
    return _identity(card.digest, "+".join(card.treatments))


def _identity(digest: str | None, treatments: str) -> Identity | None:
    return Identity(digest, treatments) if digest else None


def _make_missing_card(model: ReportModel) -> None:
    if model.card is not None or model.model_folder is None:
        return
    from vitfocus.treatments.save_load import load

    try:
        model.card = make_card(load(model.model_folder).to(default_device()))
    except (VitfocusError, RuntimeError, ImportError):
        return  # a model that cannot be built here has no card, and the report omits what the card would say
    with contextlib.suppress(OSError, VitfocusError):  # a read-only folder can be reported on too
        write_json(model.model_folder.parent / CARD, Cards({model.name: model.card}), indent=1)


def _make_names_unique(models: Sequence[ReportModel]) -> None:
    """Add the folder to names that several models have, and a number if they are still not unique."""
    counts = Counter(model.name for model in models)
    for model in models:
        if counts[model.name] > 1:
            folder = model.folders[0].resolve()
            model.name = f"{model.name} ({(folder.parent if folder.name == model.name else folder).name})"
    for index, model in enumerate(models):
        model.name = unique_label(model.name, [one.name for one in models[:index]])


def _shorten_names(models: Sequence[ReportModel]) -> None:
    """If all models have the same architecture, name them by their treatments."""
    if len(models) > 1 and len({model.name.partition("+")[0] for model in models}) == 1:
        for model in models:
            base, plus, treatments = model.name.partition("+")
            model.full_name, model.name = model.name, f"+{treatments}" if plus else base
