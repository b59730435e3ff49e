"""What stands out in a diagnosis, in plain sentences and by stated thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]

#: What a diagnosis against a second set of images, not a named corruption, calls it.
SECOND = "the second images"


@dataclass(frozen=True)
class Thresholds:
    """From where on a number is worth a sentence.

    `overfocus`: the share of attention that the top 5 % of the tokens receive. `spread`: the entropy that 15 % of
    the rows exceed, as a part of its bound. `narrow`: mean entropy likewise, but from there downwards. `alike_rows`:
    ADL's value (official form). `alike_heads`: mean cosine between heads. `unstable`: mean cosine between the clean and
    the corrupted maps, from there downwards.
    """

    overfocus: float = 0.30
    spread: float = 0.90
    narrow: float = 0.35
    alike_rows: float = 0.80
    alike_heads: float = 0.80
    unstable: float = 0.70

    def to_dict(self) -> dict[str, float]:
        """The thresholds by name."""
        return asdict(self)


def findings(rows: Sequence[Row], against: str | None = None, thresholds: Thresholds | None = None) -> list[str]:
    """The sentences, the gravest of each kind first.

    >>> rows = [{"layer": 11, "attention_kind": "global", "overfocus": 0.55, "stability": 0.44}]
    >>> findings(rows, "gaussian_noise/3")[0]
    'Layer 11: 5 % of the tokens receive 55 % of the attention; under gaussian_noise/3 its maps keep a cosine of 0.44.'
    """
    limit = thresholds or Thresholds()
    read = [row for row in rows if "entropy" in row or "overfocus" in row]
    sentences = _unread(rows)
    sentences += _overfocused(read, limit, against)
    sentences += _unstable(read, limit, against)
    sentences += _group(
        [row for row in read if _part(row, "entropy_p85") >= limit.spread],
        "entropy_p85",
        "15 % of the rows have an entropy of {} or more, where uniform attention has {bound:.2f} nats: nearly uniform, "
        "which softmax learns badly; Context Broadcasting (cb) supplies it by hand.",
    )
    sentences += _group(
        [row for row in read if 0 <= _part(row, "entropy") <= limit.narrow],
        "entropy",
        "mean entropy {} of at most {bound:.2f} nats: each query looks at very few tokens.",
    )
    sentences += _group(
        [row for row in read if row.get("diversity_official", 0) >= limit.alike_rows],
        "diversity_official",
        "the rows of a map have a cosine of {} with their mean: all queries look at the same tokens; the Attention "
        "Diversification Loss (adl) is meant for this.",
    )
    sentences += _group(
        [row for row in read if row.get("head_similarity", 0) >= limit.alike_heads],
        "head_similarity",
        "the heads' maps have a mean cosine of {} with one another: the heads do much the same.",
    )
    if read and not sentences:
        sentences.append("Nothing stands out by the default thresholds.")
    return sentences


def _unread(rows: Sequence[Row]) -> list[str]:
    """One sentence for each kind of layer that has no token-to-token map."""
    says = {
        "none": "{} no attention at all (an MLP or pooling mixes the tokens): there is nothing to read.",
        "channel": "{} attention between channels, not between tokens: there is no token map to read.",
        "outlook": "{} outlook attention, which weighs a local window without queries and keys: there is no token map.",
        "class": "{} class attention: only the class token looks, so distance and row diversity have no meaning.",
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
        sentences.append(f"{_layers(blind)}: the attention could not be seen as it ran, so there are no numbers.")
    return sentences


def _overfocused(rows: Sequence[Row], limit: Thresholds, against: str | None) -> list[str]:
    over = sorted(
        (row for row in rows if row.get("overfocus", 0) >= limit.overfocus), key=lambda row: -row["overfocus"]
    )
    sentences = []
    for row in over[:3]:
        text = f"Layer {row['layer']}: 5 % of the tokens receive {100 * row['overfocus']:.0f} % of the attention"
        if against and "stability" in row:
            text += f"; {_under(against)} its maps keep a cosine of {row['stability']:.2f}"
        sentences.append(f"{text}.")
    if len(over) > 3:
        rest = over[3:]
        low, high = (f"{100 * row['overfocus']:.0f}" for row in (rest[-1], rest[0]))
        share = f"{low} to {high}" if low != high else low
        sentences.append(f"{_layers(row['layer'] for row in rest)}: the same 5 % receive {share} %.")
    if over:
        sentences.append(
            "Token-aware Average Pooling (tap) and the Attention Diversification Loss (adl) treat overfocus."
        )
    return sentences


def _unstable(rows: Sequence[Row], limit: Thresholds, against: str | None) -> list[str]:
    told = {
        r["layer"]
        for r in sorted(rows, key=lambda r: -r.get("overfocus", 0))[:3]
        if r.get("overfocus", 0) >= limit.overfocus
    }
    shaky = [row for row in rows if row.get("stability", 1) < limit.unstable and row["layer"] not in told]
    return _group(shaky, "stability", f"{_under(against)} the maps keep a cosine of only {{}}.")


def _under(against: str | None) -> str:
    return f"against {against}" if against in (SECOND, None) else f"under {against}"


def _part(row: Row, key: str) -> float:
    """An entropy as a part of its bound; -1 where there is none."""
    return row[key] / row["entropy_bound"] if key in row and row.get("entropy_bound") else -1.0


def _group(rows: Sequence[Row], key: str, text: str) -> list[str]:
    """One sentence for all layers of which it is true."""
    if not rows:
        return []
    low, high = (f"{pick(row[key] for row in rows):.2f}" for pick in (min, max))
    value = low if low == high else f"{low} to {high}"
    bound = max((row.get("entropy_bound", 0.0) for row in rows), default=0.0)
    return [f"{_layers(row['layer'] for row in rows)}: {text.format(value, bound=bound)}"]


def _layers(layers: Iterable[int]) -> str:
    """Layer numbers as a person writes them.

    >>> _layers([3]), _layers([0, 1, 2, 7])
    ('Layer 3', 'Layers 0–2 and 7')
    """
    numbers = sorted(layers)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"Layer {joined}" if len(numbers) == 1 else f"Layers {joined}"
