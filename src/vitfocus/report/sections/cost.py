"""Cost: parameters, multiply-adds, step time and memory, counted or measured, with the hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vitfocus.report.model_card import Times
from vitfocus.report.page import Cell, Page
from vitfocus.report.runs import ReportModel

_COUNTED = "counted"
Measure = Callable[[ReportModel], tuple[str, float] | None]


def add_cost(page: Page, models: Sequence[ReportModel]) -> None:
    """A table of what is known, one column per model."""
    rows: list[list[Any]] = []
    places: dict[str, str] = {}
    for label, place, measure in _measures(models):
        found = [measure(model) for model in models]
        if not any(found):
            continue
        base = found[0]
        cells = [Cell(*one) if one else None for one in found]
        ratios = [
            Cell(f"{one[1] / base[1]:.3f}", one[1] / base[1]) if one and base and base[1] else None for one in found[1:]
        ]
        if place not in places and place != _COUNTED:
            places[place] = chr(ord("a") + len(places))
        rows.append([label, places.get(place, place), *cells, *ratios])
    if not rows:
        return
    page.section("Cost")
    first, *others = [model.name for model in models]
    page.table("costs", ["cost", "measured", first, *others, *(f"{name} ÷ {first}" for name in others)], rows)
    page.points([f"{letter}: {place}." for place, letter in places.items()])
    page.text(
        "Multiply-adds count matrix products and convolutions for one image (papers call them FLOPs). Times are "
        "medians with the range in brackets; a wide range means that the machine was busy. A training step is a "
        "forward pass, a backward pass and a step of AdamW; its memory is the weights, the optimiser's state and the "
        "peak allocation of the step.",
        quiet=True,
    )


def _measures(models: Sequence[ReportModel]) -> list[tuple[str, str, Measure]]:
    """The rows of the table: label, conditions of the measurement, and how to read it."""
    rows: list[tuple[str, str, Measure]] = [
        ("parameters", _COUNTED, _parameters),
        ("multiply-adds per image (G)", _COUNTED, _multiply_adds),
    ]
    for place in dict.fromkeys(place for s in models if (place := _circumstances(s))):
        rows += [
            ("forward pass (ms)", place, _time("forward_seconds", place)),
            ("training step (ms)", place, _time("step_seconds", place)),
            ("memory of a step (MiB)", place, _memory(place)),
        ]
    for place in dict.fromkeys(place for s in models if (place := _training_place(s))):
        rows += [
            ("step of the training run (ms)", place, _training(place, "step")),
            ("images per second of the training run", place, _training(place, "images_per_second")),
            ("whole training run (s)", place, _training(place, "seconds")),
            ("peak memory of the training run (MiB)", place, _training(place, "peak_memory_bytes")),
        ]
    return rows


def _parameters(model: ReportModel) -> tuple[str, float] | None:
    count = model.card.parameters if model.card is not None else None
    if count is None and model.training is not None:
        count = model.training.results.get("parameters")
    for scores in model.scores if count is None else ():
        described = scores.fingerprint.get("models", {})
        count = next((one.get("parameters") for one in described.values()), None)
    return (f"{count:,}", float(count)) if count else None


def _multiply_adds(model: ReportModel) -> tuple[str, float] | None:
    count = model.card.multiply_adds if model.card is not None else None
    return (f"{count / 1e9:.4g}", count / 1e9) if count else None


def _circumstances(model: ReportModel) -> str | None:
    cost = model.card.cost if model.card is not None else None
    if cost is None:
        return None
    return f"batch {cost.batch}, {cost.dtype}, {cost.device}, torch {cost.torch}, timed separately"


def _time(key: str, place: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if model.card is None or model.card.cost is None or _circumstances(model) != place:
            return None
        taken: Times = getattr(model.card.cost, key)
        low, high = (1e3 * end for end in taken.range)
        return f"{_shown(1e3 * taken.median)} [{_shown(low)} to {_shown(high)}]", 1e3 * taken.median

    return measure


def _memory(place: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if model.card is None or model.card.cost is None or _circumstances(model) != place:
            return None
        mib = model.card.cost.memory_bytes / 2**20
        return _shown(mib), mib

    return measure


def _training_place(model: ReportModel) -> str | None:
    results = model.training.results if model.training is not None else {}
    if not results.get("steps") or not results.get("seconds") or not results.get("device"):
        return None
    batch = (model.training.recipe if model.training else {}).get("data", {}).get("batch")
    parts = [f"batch {batch}" if batch else "", str(results.get("precision") or ""), str(results["device"])]
    parts.append(f"torch {results['versions']['torch']}" if "torch" in results.get("versions", {}) else "")
    parts.append("during training")
    return ", ".join(part for part in parts if part)


def _training(place: str, key: str) -> Measure:
    def measure(model: ReportModel) -> tuple[str, float] | None:
        if _training_place(model) != place or model.training is None:
            return None
        results = model.training.results
        value = 1e3 * results["seconds"] / results["steps"] if key == "step" else results.get(key)
        if not value:
            return None
        value = value / 2**20 if key == "peak_memory_bytes" else value
        return _shown(value), float(value)

    return measure


def _shown(value: float) -> str:
    """Three digits, and no exponent for large numbers.

    >>> _shown(2783.4), _shown(0.012345), _shown(81.26)
    ('2,783', '0.0123', '81.3')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
