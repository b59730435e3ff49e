"""What stands out in a diagnosis, in plain sentences, by the thresholds of the readings' records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitfocus.attention.readings import READINGS, Finding
from vitfocus.core.tables import ranges

Row = dict[str, Any]

#: What a diagnosis against a second set of images, not a named corruption, calls it.
SECOND = "the second images"


def default_thresholds() -> dict[str, float]:
    """The value from which on each finding is reported, by its name.

    >>> default_thresholds()["overfocus"]
    0.3
    """
    return {finding.name: finding.threshold for reading in READINGS.values() for finding in reading.findings}


def findings(
    rows: Sequence[Row], against: str | None = None, thresholds: Mapping[str, float] | None = None
) -> list[str]:
    """The sentences that are true of these rows, one per kind of finding, overfocus first.

    Args:
        rows: the rows of a diagnosis.
        against: the corruption or images that stability was measured against.
        thresholds: values that replace some of `default_thresholds`.

    Example:
        >>> rows = [{"layer": 11, "attention_kind": "global", "overfocus": 0.55}]
        >>> findings(rows)[0]
        'Layer 11: 5 % of the tokens receive 55 % of the attention.'
    """
    limits = default_thresholds() | dict(thresholds or {})
    read = [row for row in rows if "entropy" in row or "overfocus" in row]
    sentences = _unread(rows)
    over = sorted((row for row in read if row.get("overfocus", 0) >= limits["overfocus"]), key=_least_overfocus)
    sentences += _overfocused(over, against)
    told = {row["layer"] for row in over[:3]} if against else set()
    for key, reading in READINGS.items():
        for finding in reading.findings:
            found = [row for row in rows if finding.holds(row, key, limits[finding.name])]
            if key == "stability":
                found = [row for row in found if row["layer"] not in told]
            if finding.sentence and found:
                sentences.append(_sentence(found, key, finding, against))
    if read and not sentences:
        sentences.append("Nothing stands out by the default thresholds.")
    return sentences


def _unread(rows: Sequence[Row]) -> list[str]:
    """One sentence for each kind of layer that has no token-to-token map."""
    says = {
        "none": "{} no attention (an MLP or pooling mixes the tokens): there is nothing to read.",
        "channel": "{} attention between channels, not between tokens: there is no token map to read.",
        "outlook": "{} outlook attention, which weighs a local window without queries and keys: there is no token map.",
        "class": "{} class attention: only the class token attends, so distance and row similarity have no meaning.",
    }
    sentences = []
    for kind, text in says.items():
        layers = [row["layer"] for row in rows if row.get("attention_kind") == kind]
        if layers:
            sentences.append(text.format(f"{_layers(layers)} {'has' if len(layers) == 1 else 'have'}"))
    blind = [
        row["layer"]
        for row in rows
        if row.get("attention_kind") not in says and "entropy" not in row and "overfocus" not in row
    ]
    if blind:
        sentences.append(f"{_layers(blind)}: the attention could not be observed, so there are no numbers.")
    return sentences


def _least_overfocus(row: Row) -> float:
    return -float(row["overfocus"])


def _overfocused(over: Sequence[Row], against: str | None) -> list[str]:
    """One sentence for each of the three most overfocused layers, and one for the rest."""
    sentences = []
    for row in over[:3]:
        text = f"Layer {row['layer']}: 5 % of the tokens receive {100 * row['overfocus']:.0f} % of the attention"
        if against and "stability" in row:
            text += (
                f"; {_under(against)} its maps have a cosine similarity of {row['stability']:.2f} with the clean ones"
            )
        sentences.append(f"{text}.")
    if len(over) > 3:
        rest = over[3:]
        low, high = (f"{100 * row['overfocus']:.0f}" for row in (rest[-1], rest[0]))
        share = f"{low} to {high}" if low != high else low
        sentences.append(f"{_layers(row['layer'] for row in rest)}: 5 % of the tokens receive {share} %.")
    if over:
        sentences.append(
            "Token-aware Average Pooling (tap) and the Attention Diversification Loss (adl) treat overfocus."
        )
    return sentences


def _under(against: str | None) -> str:
    return f"against {against}" if against in (SECOND, None) else f"under {against}"


def _sentence(rows: Sequence[Row], key: str, finding: Finding, against: str | None) -> str:
    """One sentence for all layers of which it is true."""
    written = READINGS[key].format if READINGS[key].format.endswith("%") else ".2f"
    low, high = (format(pick(row[key] for row in rows), written) for pick in (min, max))
    value = low if low == high else f"{low} to {high}"
    bound = max((row.get("entropy_bound", 0.0) for row in rows), default=0.0)
    text = finding.sentence.format(value, bound=bound, under=_under(against))
    return f"{_layers(row['layer'] for row in rows)}: {text}"


def _layers(layers: Iterable[int]) -> str:
    """Layer numbers in words.

    >>> _layers([3]), _layers([0, 1, 2, 7])
    ('Layer 3', 'Layers 0–2 and 7')
    """
    numbers = sorted(layers)
    parts = ranges(numbers)
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"Layer {joined}" if len(numbers) == 1 else f"Layers {joined}"
