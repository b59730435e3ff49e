"""The demo's report: what was compared, who is better by how much, and what attention does in each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitfocus import __version__
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.report.figures import plot
from vitfocus.report.page import Page
from vitfocus.robustness import Scores

#: What a reading means, in a sentence, and the figure that shows it.
READINGS = {
    "entropy": "Entropy: how many tokens a token listens to. The line at the top is uniform attention.",
    "distance": "Distance: how far away, in units of the image's side, the tokens are that a token listens to.",
    "overfocus": "Overfocus: the share of all attention that the most attended 5 % of the tokens receive.",
    "stability": "Stability: the cosine between a layer's attention maps on clean and on noisy images.",
    "heads": "Head similarity: the cosine between the maps of different heads; lower means that heads differ.",
}


def overview(
    treatment: str,
    runs: Mapping[str, Mapping[str, Any]],
    diagnoses: Mapping[str, Diagnosis],
    scores: Scores,
    path: Path,
) -> list[dict[str, str]]:
    """Write the page and return the table's rows."""
    rows = _rows(runs, diagnoses, scores)
    page = Page("A plain and a treated vision transformer")
    page.text(
        f"Two tiny ViTs, trained alike on the embedded Shapes; the treated one carries {treatment}. Both were measured "
        f"on the same {scores.images:,} images under the same corruptions, drawn from the same seed."
    )
    page.section("Side by side").table(
        ["", "plain", "treated"], [[row["what"], row["plain"], row["treated"]] for row in rows]
    )
    page.text(
        "One training run each: a difference of a few points here is as likely chance as treatment. Intervals are "
        "bootstrap 95 % intervals over the images, not over training runs.",
        quiet=True,
    )
    page.section("Corruption by corruption")
    page.table(["error (%), mean over severities", *scores.models], _by_corruption(scores))
    page.section("What attention does")
    for kind, meaning in READINGS.items():
        page.figure(plot(diagnoses, kind), meaning)
    for name, diagnosis in diagnoses.items():
        page.section(f"What stands out in the {name} model").points(
            diagnosis.findings or ["Nothing crosses a threshold."]
        )
    page.section("How these numbers came about")
    page.points([f"vitfocus {__version__}", *scores.notes])
    page.write(path)
    return rows


def _rows(
    runs: Mapping[str, Mapping[str, Any]], diagnoses: Mapping[str, Diagnosis], scores: Scores
) -> list[dict[str, str]]:
    def by_model(what: str, show: Any) -> dict[str, str]:
        return {"what": what, **{name: show(name) for name in runs}}

    def reading(key: str, digits: int = 2) -> Any:
        def show(name: str) -> str:
            values = [row[key] for row in diagnoses[name].rows if key in row]
            return f"{sum(values) / len(values):.{digits}f}" if values else ""

        return show

    def score(key: str) -> Any:
        def show(name: str) -> str:
            summary = scores.models[name]
            low, high = summary[f"{key}_interval"]
            return f"{summary[key]:.1f} [{low:.1f}, {high:.1f}]"

        return show

    return [
        by_model("parameters", lambda name: f"{runs[name]['parameters']:,}"),
        by_model("top-1, clean (%)", score("top1")),
        by_model("error, mean over 15 corruptions × 5 severities (%)", score("mean_error")),
        by_model("attention entropy, mean over layers (nats)", reading("entropy")),
        by_model("overfocus: attention on the top 5 % of tokens", reading("overfocus")),
        by_model("stability of the maps under gaussian_noise/3 (cosine)", reading("stability")),
        by_model("similarity between heads (cosine)", reading("head_similarity")),
    ]


def _by_corruption(scores: Scores) -> list[list[str]]:
    names = next(iter(scores.models.values()))["corruptions"]
    return [[name, *(f"{scores.models[m]['corruptions'][name]['error']:.1f}" for m in scores.models)] for name in names]
