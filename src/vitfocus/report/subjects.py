"""Who is compared: the evidence of all folders brought together, model by model.

A model is known by the digest of its weights and by its treatments (some of which add no weights), so that a training
run, an evaluation in another folder and a diagnosis in a third become one column of the report. Evidence without a
digest goes by the folder it lies in, or by its name.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file

from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core.environment import default_device
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.report.card import CARD, Card, make_card
from vitfocus.report.evidence import Found, Training, find_evidence
from vitfocus.robustness.pixels import tensors_digest
from vitfocus.robustness.results import Scores

WEIGHTS = "model.safetensors"


class Identity(NamedTuple):
    """What makes two pieces of evidence be about one model."""

    digest: str
    treatments: str


@dataclass
class Subject:
    """One model and all that is known of it. `scores` are of this model alone, `data` goes with the `diagnoses`."""

    name: str
    identity: Identity | None = None
    training: Training | None = None
    scores: list[Scores] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    card: Card | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    full_name: str = ""

    @property
    def model_folder(self) -> Path | None:
        """Where the trained model can be loaded from, if it can."""
        folder = self.training.folder / "model" if self.training is not None else None
        return folder if folder is not None and (folder / WEIGHTS).is_file() else None

    @property
    def treatments(self) -> list[str] | None:
        """The specs of its treatments; None where no file says."""
        if self.card is not None:
            return list(self.card["treatments"])
        if self.training is not None and self.training.spec:
            from vitfocus.treatments.spec import split_spec

            try:
                return [str(treatment) for treatment in split_spec(self.training.spec)[1]]
            except VitfocusError:
                return None
        for scores in self.scores:
            text = scores.fingerprint.get("models", {}).get(scores_name(scores), {}).get("treatments")
            if text is not None:
                return [text] if text else []
        return None

    @property
    def inserted(self) -> str:
        """The treatments that were inserted after its weights were last trained, by whichever file says so."""
        described = [scores.fingerprint.get("models", {}).get(scores_name(scores), {}) for scores in self.scores]
        said = [one.get("inserted", "") for one in (self.card or {}, *described)]
        return next(filter(None, (*said, *(diagnosis.inserted for diagnosis in self.diagnoses))), "")


def scores_name(scores: Scores) -> str:
    """The one model of these scores."""
    return next(iter(scores.models))


def gather(runs: Iterable[str | Path], make_cards: bool = True) -> list[Subject]:
    """The models of some run folders, in the order given; within a folder the untreated ones come first.

    `make_cards` loads a trained model that has no card yet, describes it, and keeps the card in its folder.
    """
    found: dict[Path, tuple[int, Found]] = {}
    for place, run in enumerate(dict.fromkeys(Path(run) for run in runs)):
        for one in find_evidence(run):
            folder = one.folder.resolve()
            if folder not in found:
                found[folder] = (place, one)
            elif found[folder][1].within is None:  # named by itself before the run it belongs to
                found[folder] = (found[folder][0], one)
    subjects: list[Subject] = []
    for _, one in sorted(found.values(), key=lambda pair: pair[1].training is None):
        _take(one, subjects)
    first = {id(s): min(found[f.resolve()][0] for f in s.folders) for s in subjects}
    subjects.sort(key=lambda subject: (first[id(subject)], bool(subject.treatments)))
    if make_cards:
        for subject in subjects:
            _describe(subject)
    _tell_apart(subjects)
    return subjects


def _take(found: Found, subjects: list[Subject]) -> None:
    """Add a folder's evidence to the subjects it belongs to, or to new ones."""
    if found.training is not None:
        subject = Subject(_run_name(found.folder), stored_identity(found.folder / "model"), found.training)
        cards = [card for card in found.cards.values() if _of_card(card) == subject.identity]
        subject.card = cards[0] if cards and subject.identity else None
        subject.folders.append(found.folder)
        subjects.append(subject)
    if found.scores is not None:
        for name in found.scores.models:
            alone = found.scores.only(name)
            described = alone.fingerprint.get("models", {}).get(name, {})
            known = _identity(described.get("digest"), described.get("treatments", ""))
            subject = _subject_of(name, known, found, subjects, len(found.scores.models) == 1)
            subject.scores.append(alone)
            _add(subject, found, name)
    if found.diagnosis is not None:
        cards = list(found.cards.values())
        known = _of_card(cards[0]) if len(cards) == 1 else None
        subject = _subject_of(found.diagnosis.model, known, found, subjects, True)
        subject.diagnoses.append(found.diagnosis)
        subject.data.append(found.data)
        _add(subject, found, found.diagnosis.model)


def _add(subject: Subject, found: Found, name: str) -> None:
    card = found.cards.get(name)
    if subject.card is None and card is not None and subject.identity in (None, _of_card(card)):
        subject.card = card
    if found.folder not in subject.folders:
        subject.folders.append(found.folder)


def _subject_of(name: str, known: Identity | None, found: Found, subjects: list[Subject], alone: bool) -> Subject:
    """The subject that evidence under this name and identity belongs to."""
    if known is not None:
        for subject in subjects:
            if subject.identity == known:
                return subject
        for subject in subjects:
            if subject.training is not None and stored_identity(subject.training.folder / "best") == known:
                return _new(Subject(f"{subject.name} (best)", known), subjects)
    elif alone and found.within is not None:
        for subject in subjects:
            if subject.training is not None and subject.training.folder == found.within:
                return subject
    for subject in subjects:
        if subject.name == name and (known is None or subject.identity is None):
            if found.diagnosis is not None and subject.training is None and _same_question(subject, found.diagnosis):
                continue  # two diagnoses of one kind under one name are of two models
            subject.identity = subject.identity or known
            return subject
    return _new(Subject(name, known), subjects)


def _new(subject: Subject, subjects: list[Subject]) -> Subject:
    subjects.append(subject)
    return subject


def _same_question(subject: Subject, diagnosis: Diagnosis) -> bool:
    asked = (diagnosis.images, diagnosis.size, diagnosis.against)
    return any((one.images, one.size, one.against) == asked for one in subject.diagnoses)


def stored_identity(folder: Path) -> Identity | None:
    """A saved model's identity, its digest as an evaluation computes it; None where there is nothing to read."""
    if not (folder / WEIGHTS).is_file():
        return None
    try:
        treatments = json.loads((folder / "config.json").read_text("utf-8"))["treatments"]
        return Identity(tensors_digest(load_file(folder / WEIGHTS)), "+".join(treatments))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def _of_card(card: Card) -> Identity | None:
    return _identity(card.get("digest"), "+".join(card.get("treatments", ())))


def _identity(digest: str | None, treatments: str) -> Identity | None:
    return Identity(digest, treatments) if digest else None


def _describe(subject: Subject) -> None:
    """Make the card of a trained model that has none."""
    if subject.card is not None or subject.model_folder is None:
        return
    from vitfocus.treatments.save_load import load

    try:
        model = load(subject.model_folder)
        subject.card = make_card(model.to(default_device()))
    except (VitfocusError, RuntimeError, ImportError):
        return  # a model that cannot be built here has no card, and the report says nothing of it
    with contextlib.suppress(OSError):  # a folder that may only be read is reported on all the same
        write_text(subject.model_folder.parent / CARD, json.dumps({"models": {subject.name: subject.card}}, indent=1))


def _run_name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _tell_apart(subjects: Sequence[Subject]) -> None:
    """Give every subject a name of its own: with its folder where names clash, with a number where that clashes too."""
    for clash in [name for name in {s.name for s in subjects} if sum(s.name == name for s in subjects) > 1]:
        for subject in [s for s in subjects if s.name == clash]:
            folder = subject.folders[0].resolve()
            place = folder.parent if folder.name == clash else folder
            subject.name = f"{clash} ({place.name})"
    seen: dict[str, int] = {}
    for subject in subjects:
        seen[subject.name] = seen.get(subject.name, 0) + 1
        if seen[subject.name] > 1:
            subject.name = f"{subject.name} #{seen[subject.name]}"
    _shorten(subjects)


def _shorten(subjects: Sequence[Subject]) -> None:
    """Where all are one architecture, differently treated, the treatments are name enough."""
    bases = {subject.name.partition("+")[0] for subject in subjects}
    if len(subjects) > 1 and len(bases) == 1:
        for subject in subjects:
            base, plus, treatments = subject.name.partition("+")
            subject.full_name, subject.name = subject.name, f"+{treatments}" if plus else base
