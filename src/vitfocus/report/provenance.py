"""Provenance: the models, the data they were trained and measured on, and the fingerprint of each protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitfocus.report.comparison import SharedTest
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel, setting_of, short_path
from vitfocus.robustness.run_folder import MAY_DIFFER, differences, flat_settings
from vitfocus.tasks import items_of


def add_provenance(page: Page, models: Sequence[ReportModel], tests: Sequence[SharedTest]) -> None:
    """The models, their data, how two protocols of one suite differ, and all fingerprints."""
    page.section("Data and provenance")
    headings = ["model", "architecture", "treatments", "weights (SHA-256)", "from"]
    page.table("models", headings, [_model(one) for one in models])
    tested = [_test(test) for test in tests] + _diagnosed(models)
    if tested:
        page.heading("Measured on")
        page.table("data of the measurements", ["measurement", "images", "data digest", "models", "seed"], tested)
    trained = [_training(one) for one in models if one.training is not None]
    if trained:
        page.heading("Trained on")
        tasks = [str(one.training.results.get("task")) for one in models if one.training is not None]
        items = " or ".join(dict.fromkeys(map(items_of, tasks)))
        headings = ["model", "recipe", "data", f"training {items}", f"validation {items}", "epochs", "seed"]
        headings.append("data digest")
        page.table("training", headings, trained)
    for sentence in _protocol_differences(tests):
        page.text(sentence, quiet=True)
    for test in tests:
        _add_settings(page, f"fingerprint of {test.name}", test.fingerprint, MAY_DIFFER)
    for model in models:
        if model.training is not None and model.training.results:
            kept = {k: v for k, v in model.training.results.items() if k in _TRAINING_FACTS}
            _add_settings(page, f"fingerprint of the training of {model.name}", kept)


_TRAINING_FACTS = frozenset(
    {"recipe", "spec", "data_sha256", "model_sha256", "preprocessing", "precision", "device", "processes", "versions"}
    | {"compiled", "classes"}
)


def _model(model: ReportModel) -> list[Any]:
    treatments = model.treatments
    shown = None if treatments is None else " + ".join(treatments) or "none"
    spec = model.training.spec if model.training is not None else model.full_name
    return [
        model.name,
        spec.partition("+")[0] or None,
        shown,
        _short(model.identity and model.identity.digest),
        ", ".join(short_path(folder) for folder in model.folders),
    ]


def _test(test: SharedTest) -> list[Any]:
    data = test.fingerprint.get("data", {})
    images = next(iter(test.scores.values())).images
    seed = test.fingerprint.get("protocol", {}).get("seed")
    return [test.name, _count(images), _short(data.get("digest")), ", ".join(test.scores), seed]


def _diagnosed(models: Sequence[ReportModel]) -> list[list[Any]]:
    """One line per set of images that was diagnosed."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for model in models:
        for diagnosis, data in zip(model.diagnoses, model.data, strict=True):
            groups.setdefault((*setting_of(diagnosis), data.source, data.digest), []).append(model.name)
    lines: list[list[Any]] = []
    for (images, size, against, source, digest), names in groups.items():
        what = f"attention, at {size[0]}×{size[1]} pixels" + (f", clean and under {against}" if against else "")
        what += f", on {source}" if source else ""
        lines.append([what, _count(images), _short(digest), ", ".join(dict.fromkeys(names)), None])
    return lines


def _training(model: ReportModel) -> list[Any]:
    training = model.training
    assert training is not None
    results, data = training.results, training.recipe.get("data", {})
    epochs = f"{results['epochs']:.4g}" if "epochs" in results else None
    if not training.finished:
        last = training.rows[-1] if training.rows else {}
        epochs = f"{last.get('epoch', 0):.2f} (not finished)"
    digests = results.get("data_sha256") or {}
    return [
        model.name,
        results.get("recipe") or training.recipe.get("name"),
        data.get("source"),
        _count(results.get("train_images")),
        _count(results.get("val_images")),
        epochs,
        training.recipe.get("engine", {}).get("seed"),
        ", ".join(f"{split} {_short(value)}" for split, value in digests.items()) or None,
    ]


def _protocol_differences(tests: Sequence[SharedTest]) -> list[str]:
    """Why scores of one suite are not compared."""
    sentences = []
    for i, one in enumerate(tests):
        for two in tests[i + 1 :]:
            suites = [next(iter(test.scores.values())).suite for test in (one, two)]
            if suites[0] == suites[1]:
                what = (
                    "; ".join(differences(one.fingerprint, two.fingerprint, MAY_DIFFER))
                    or "nothing; they are of the same model"
                )
                sentences.append(f"{one.name} and {two.name} are not compared with each other; they differ in: {what}.")
    return sentences


def _add_settings(page: Page, name: str, settings: Mapping[str, Any], ignored: Sequence[str] = ()) -> None:
    """A folded table of nested settings, by dotted name."""
    rows = [
        [key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
        for key, value in flat_settings(settings, ignored)
        if value is not None
    ]
    page.table(name, ["setting", "value"], rows, folded=True)


def _short(digest: Any) -> str | None:
    return str(digest)[:12] if digest else None


def _count(number: Any) -> Cell | None:
    return Cell(f"{number:,}", number) if isinstance(number, int) else None
