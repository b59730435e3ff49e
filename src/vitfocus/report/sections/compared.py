"""What was compared, and on what data: models, tests, trainings, and the fingerprints that say how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitfocus.report.page import Cell, Page
from vitfocus.report.subjects import Subject
from vitfocus.report.verdict import Test
from vitfocus.robustness.fingerprint import FREE, differences


def add_compared(page: Page, subjects: Sequence[Subject], taken: Sequence[Test]) -> None:
    """The models, what they were tested and trained on, and where two tests of one suite differ."""
    page.section("What was compared, and on what data")
    headings = ["model", "architecture", "treatments", "weights (SHA-256)", "from"]
    page.table("models", headings, [_model(one) for one in subjects])
    tested = [_test(test) for test in taken] + _diagnosed(subjects)
    if tested:
        page.heading("Measured on")
        page.table("data of the measurements", ["what", "images", "data digest", "of the models", "seed"], tested)
    trained = [_training(one) for one in subjects if one.training is not None]
    if trained:
        page.heading("Trained on")
        headings = ["model", "recipe", "data", "training images", "validation images", "epochs", "seed", "data digest"]
        page.table("training", headings, trained)
    for sentence in _disagreements(taken):
        page.text(sentence, quiet=True)
    for test in taken:
        shared = {key: value for key, value in test.fingerprint.items() if key not in FREE}
        page.table(f"fingerprint of {test.name}", ["what", "value"], list(flat(shared)), folded=True)
    for subject in subjects:
        if subject.training is not None and subject.training.results:
            kept = {k: v for k, v in subject.training.results.items() if k in _TRAINING_FACTS}
            page.table(
                f"fingerprint of the training of {subject.name}", ["what", "value"], list(flat(kept)), folded=True
            )


_TRAINING_FACTS = frozenset(
    {"recipe", "spec", "data_sha256", "model_sha256", "preprocessing", "precision", "device", "processes", "versions"}
    | {"compiled", "classes"}
)


def _model(subject: Subject) -> list[Any]:
    treatments = subject.treatments
    shown = None if treatments is None else " + ".join(treatments) or "none"
    return [
        subject.name,
        _architecture(subject),
        shown,
        _short(subject.identity and subject.identity.digest),
        ", ".join(_place(folder) for folder in subject.folders),
    ]


def _architecture(subject: Subject) -> str | None:
    """The model's name without its treatments, where a file or the name itself tells it."""
    spec = subject.training.spec if subject.training is not None else subject.full_name
    return spec.partition("+")[0] or None


def _place(folder: Any) -> str:
    """A folder's last two names: enough to recognise it, and no more of the machine than that."""
    return "/".join(folder.resolve().parts[-2:])


def _test(test: Test) -> list[Any]:
    data = test.fingerprint.get("data", {})
    images = next(iter(test.scores.values())).images
    seed = test.fingerprint.get("protocol", {}).get("seed")
    return [test.name, _count(images), _short(data.get("digest")), ", ".join(test.scores), seed]


def _diagnosed(subjects: Sequence[Subject]) -> list[list[Any]]:
    """One line for every set of images that attention was read on."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for subject in subjects:
        for diagnosis, data in zip(subject.diagnoses, subject.data, strict=True):
            asked = (diagnosis.images, diagnosis.size, diagnosis.against, data.get("source"), data.get("digest"))
            groups.setdefault(asked, []).append(subject.name)
    lines: list[list[Any]] = []
    for (images, size, against, source, digest), names in groups.items():
        what = f"attention, at {size[0]}×{size[1]} pixels" + (f", clean and under {against}" if against else "")
        what += f", on {source}" if source else ""
        lines.append([what, _count(images), _short(digest), ", ".join(dict.fromkeys(names)), None])
    return lines


def _training(subject: Subject) -> list[Any]:
    training = subject.training
    assert training is not None
    results, data = training.results, training.recipe.get("data", {})
    epochs = f"{results['epochs']:.4g}" if "epochs" in results else None
    if not training.finished:
        last = training.rows[-1] if training.rows else {}
        epochs = f"{last.get('epoch', 0):.2f} (not finished)"
    digests = results.get("data_sha256") or {}
    return [
        subject.name,
        results.get("recipe") or training.recipe.get("name"),
        data.get("source"),
        _count(results.get("train_images")),
        _count(results.get("val_images")),
        epochs,
        training.recipe.get("engine", {}).get("seed"),
        ", ".join(f"{split} {_short(value)}" for split, value in digests.items()) or None,
    ]


def _disagreements(taken: Sequence[Test]) -> list[str]:
    """Why some models' numbers on one suite are not compared."""
    sentences = []
    for i, one in enumerate(taken):
        for two in taken[i + 1 :]:
            suites = [next(iter(test.scores.values())).suite for test in (one, two)]
            if suites[0] == suites[1]:
                what = "; ".join(differences(one.fingerprint, two.fingerprint, FREE)) or "the same model, twice"
                sentences.append(f"{one.name} and {two.name} are not compared with each other; they differ in: {what}.")
    return sentences


def flat(content: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """Nested settings as rows of (dotted name, value)."""
    rows: list[list[str]] = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            rows.append([f"{prefix}{key}", ", ".join(map(str, value))])
        elif value is not None:
            rows.append([f"{prefix}{key}", str(value)])
    return rows


def _short(digest: Any) -> str | None:
    return str(digest)[:12] if digest else None


def _count(number: Any) -> Cell | None:
    return Cell(f"{number:,}", number) if isinstance(number, int) else None
