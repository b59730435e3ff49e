"""What stands out in a diagnosis: what was read, against which reference, what it may mean, the evidence, what next.

Thresholds are in the records of the readings. References are the readings of well-known models (`reference.json`,
written by `benchmarks/reference_readings.py`). The evidence is that of docs/should-i-use-it.md and depends on the
situation: the model's treatments, and whether its weights are trained.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vitfocus.attention.readings import READINGS, Finding
from vitfocus.core.tables import ranges

Row = dict[str, Any]

#: What a diagnosis against a second set of images, not a named corruption, calls it.
SECOND = "the second images"
#: Mean entropy as a share of its bound from which a layer is called nearly uniform.
NEARLY_UNIFORM = 0.95


@dataclass(frozen=True)
class Situation:
    """What the advice depends on: specs of the model's treatments, whether its weights are trained, the corruption."""

    treatments: tuple[str, ...] = ()
    trained: bool = True
    against: str | None = None
    depth: int = 0  # the model's number of blocks

    def carries(self, *names: str) -> list[str]:
        """The model's treatments of these names, as specs."""
        return [spec for spec in self.treatments if spec.partition("(")[0] in names]

    def place(self, row: Row) -> float:
        """Where a layer is between the first (0) and the last (1)."""
        return min(row["layer"] / (self.depth - 1), 1.0) if self.depth > 1 else 1.0


@dataclass(frozen=True)
class Explained:
    """One finding. `str` joins its sentences.

    Attributes:
        kind: the name of the threshold, or another short name.
        layers: the layers it is about.
        read: what was read.
        reference: values to compare with.
        meaning: what it may mean.
        evidence: what is known about treating it, in this situation.
        command: what to do next.
    """

    kind: str
    layers: tuple[int, ...]
    read: str
    reference: str = ""
    meaning: str = ""
    evidence: str = ""
    command: str = ""

    def __str__(self) -> str:
        said = [self.read, self.reference, self.meaning, self.evidence]
        return " ".join(filter(None, [*said, f"Next: {self.command}" if self.command else ""]))

    @property
    def explanation(self) -> str:
        """Everything but what was read."""
        return str(replace(self, read=""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"layers": list(self.layers)}


def default_thresholds() -> dict[str, float]:
    """The value from which on each finding is reported, by its name.

    >>> default_thresholds()["overfocus"]
    0.3
    """
    found = {finding.name: finding.threshold for reading in READINGS.values() for finding in reading.findings}
    return found | {"uniform": NEARLY_UNIFORM}


def findings(
    rows: Sequence[Row], against: str | None = None, thresholds: Mapping[str, float] | None = None
) -> list[str]:
    """The findings for these rows as text, one per kind, for a trained model without treatments.

    Args:
        rows: the rows of a diagnosis.
        against: the corruption or images that stability was measured against.
        thresholds: values that replace some of `default_thresholds`.

    Example:
        >>> rows = [{"layer": 11, "attention_kind": "global", "overfocus": 0.55}]
        >>> findings(rows)[0].partition(". ")[0]
        'Layer 11: 5 % of the tokens receive 55 % of the attention'
    """
    depth = max((row["layer"] for row in rows), default=0) + 1
    return [str(one) for one in explain(rows, Situation(against=against, depth=depth), thresholds)]


def explain(
    rows: Sequence[Row], situation: Situation, thresholds: Mapping[str, float] | None = None
) -> list[Explained]:
    """The findings for these rows in a situation, the most important first; no layer is overfocused and uniform."""
    limits = default_thresholds() | dict(thresholds or {})
    read = [row for row in rows if "entropy" in row or "overfocus" in row]
    found = [Explained("unread", (), sentence) for sentence in _unread(rows)]
    if read and not situation.trained:
        found.append(_untrained(read))
    over = [row for row in read if row.get("overfocus", 0) >= limits["overfocus"]]
    uniform = [row for row in read if row not in over and _entropy_share(row) >= limits["uniform"]]
    told = {row["layer"] for row in over}
    if over:
        found.append(_overfocus(over, situation))
    if uniform:
        found.append(_uniform(uniform, situation))
    flat = {row["layer"] for row in uniform}
    spoken = {"spread": told | flat, "alike_rows": told, "unstable": told, "alike_heads": flat}
    for key, reading in READINGS.items():
        for finding in reading.findings:
            known = spoken.get(finding.name, ())
            held = [r for r in read if finding.holds(r, key, limits[finding.name]) and r["layer"] not in known]
            if finding.sentence and held:
                found.append(_general(held, key, finding, situation))
    if read and not found:
        found.append(Explained("nothing", (), "Nothing stands out by the default thresholds."))
    return found


def _untrained(read: Sequence[Row]) -> Explained:
    return Explained(
        "untrained",
        tuple(row["layer"] for row in read),
        "The weights are untrained.",
        meaning="Attention at initialisation is close to uniform and says nothing about the trained model.",
        command="load weights (`--weights FILE` or `--pretrained`), or train first.",
    )


def _overfocus(over: Sequence[Row], situation: Situation) -> Explained:
    """The overfocused layers in one finding, the most overfocused first."""
    ordered = sorted(over, key=lambda row: -float(row["overfocus"]))
    worst = ordered[0]
    said = f"Layer {worst['layer']}: 5 % of the tokens receive {100 * worst['overfocus']:.0f} % of the attention"
    if situation.against and "stability" in worst:
        said += f"; {_under(situation.against)} its maps have a cosine similarity of {worst['stability']:.2f} with the "
        said += "clean ones"
    if len(ordered) > 1:
        others = [row["overfocus"] for row in ordered[1:]]
        said += f". {_layers(row['layer'] for row in ordered[1:])}: {_span(others, 100, '.0f')} %"
    meaning = "Nearly all queries attend to the same few tokens"
    alike = [row["diversity_official"] for row in ordered if "diversity_official" in row]
    meaning += f" (similarity of rows {_span(alike)})" if alike else ""
    return Explained(
        "overfocus",
        tuple(sorted(row["layer"] for row in over)),
        f"{said}.",
        _reference("overfocus", situation.place(worst), 100, ".0f", " %", "uniform attention has 5 %"),
        f"{meaning}: if noise changes these tokens, it changes everything that follows. In a training that failed, the "
        "same reading means that attention collapsed.",
        *_treating_overfocus(situation),
    )


def _treating_overfocus(situation: Situation) -> tuple[str, str]:
    carried = situation.carries("tap", "adl")
    if carried:
        return (
            f"The model carries {' and '.join(carried)}, which are meant to reduce this.",
            "compare with the model without them: `vitfocus report RUN_PLAIN RUN_TREATED`.",
        )
    if not situation.trained:
        return "", ""
    return (
        "Our study found no gain from adding TAP or ADL to trained weights: in a short fine-tuning ADL cost 0.52 "
        "points of accuracy, and TAP made no significant difference. From scratch both helped a baseline that trained "
        "badly; the gain over a good one is not known.",
        "measure whether it matters: `vitfocus evaluate MODEL --suite imagenet-c --data DIR`. If you trained the model "
        "and its accuracy is poor, try a lower learning rate first.",
    )


def _uniform(uniform: Sequence[Row], situation: Situation) -> Explained:
    shares = [_entropy_share(row) for row in uniform]
    lead = max(uniform, key=_entropy_share)
    return Explained(
        "uniform",
        tuple(row["layer"] for row in uniform),
        f"{_layers(row['layer'] for row in uniform)}: the mean entropy is {_span(shares, 100, '.0f')} % of that of "
        "uniform attention.",
        _reference("entropy", situation.place(lead), 100, ".0f", " %"),
        "The attention is nearly uniform: these layers average the tokens. Low overfocus and high stability follow "
        "from this alone and are no sign of robustness.",
        *_treating_spread(situation),
    )


def _treating_spread(situation: Situation) -> tuple[str, str]:
    carried = situation.carries("cb", "cbs")
    if carried:
        return (
            f"The model carries {' and '.join(carried)}, which supplies uniform attention directly.",
            "compare with the model without: `vitfocus report RUN_PLAIN RUN_TREATED`.",
        )
    if not situation.trained:
        return "", ""
    return (
        "Context Broadcasting supplies this part directly, but our study could not tell whether it helps: no "
        "significant difference, from scratch or in a short fine-tuning.",
        "nothing to treat in trained weights. If you train from scratch, compare with and without `cb(layers=upper)` "
        "over several seeds.",
    )


_MEANINGS = {
    "unstable": "What these layers attend to depends on the noise.",
    "alike_rows": "All queries look at the same tokens, though these are not few.",
    "alike_heads": "The heads do much the same; some may be redundant.",
    "narrow": "Often usual in early layers, which look at neighbours or at single tokens.",
    "spread": "Softmax learns uniform rows poorly.",
    "high_norm": "Large models keep global information in such tokens, usually in patches that show little, and lose "
    "what these patches show.",
}
_LOOK = "look at them: `vitfocus diagnose MODEL --images DIR --explore --out DIR`"


def _treating(kind: str, situation: Situation) -> tuple[str, str]:
    """The evidence and the next command for a finding."""
    if kind == "spread":
        return _treating_spread(situation)
    if kind in ("unstable", "alike_rows"):
        return _treating_overfocus(situation)
    if kind == "high_norm":
        return _treating_high_norm(situation)
    known = {"alike_heads": "No treatment here addresses this alone.", "narrow": "Not a fault in itself."}
    return known.get(kind, ""), f"{_LOOK}."


def _treating_high_norm(situation: Situation) -> tuple[str, str]:
    if carried := situation.carries("registers", "ttr"):
        return (
            f"The model carries {' and '.join(carried)}, meant to take these activations.",
            "compare with the model without them: `vitfocus report RUN_PLAIN RUN_TREATED`.",
        )
    if not situation.trained:
        return "", ""
    return (
        "Test-time registers move these activations to an added token without training; registers are trained to take "
        "them. Their authors report cleaner maps; a gain in robustness is not known.",
        f"{_LOOK} (rings mark them). To try it: `vf.treat_(model, vf.find_registers(model, images))`, then diagnose "
        "and evaluate again.",
    )


def _general(held: Sequence[Row], key: str, finding: Finding, situation: Situation) -> Explained:
    """A finding with the sentence of its record, for all layers of which it is true."""
    low, high = (f"{pick(row[key] for row in held):{_number(key)}}" for pick in (min, max))
    bound = max((row.get("entropy_bound", 0.0) for row in held), default=0.0)
    value = low if low == high else f"{low} to {high}"
    scaled = [row[key] / row[finding.share_of] if finding.share_of else row[key] for row in held]
    share = f"{_span(scaled, 100, '.0f')} %"
    said = finding.sentence.format(value, bound=bound, under=_under(situation.against), share=share)
    lead = held[scaled.index((min if finding.below else max)(scaled))]
    percent = _number(key).endswith("%")
    factor, form, unit = (100, ".2f" if percent else ".0f", " %") if finding.share_of or percent else (1, ".2f", "")
    same = key != "stability" or situation.against == reference()["against"]
    return Explained(
        finding.name,
        tuple(row["layer"] for row in held),
        f"{_layers(row['layer'] for row in held)}: {said}",
        _reference(key, situation.place(lead), factor, form, unit) if same else "",
        _MEANINGS.get(finding.name, ""),
        *_treating(finding.name, situation),
    )


def _number(key: str) -> str:
    return READINGS[key].format if READINGS[key].format.endswith("%") else ".2f"


@functools.cache
def reference() -> dict[str, Any]:
    """The readings of well-known models by layer, for comparison."""
    text = importlib.resources.files("vitfocus.attention").joinpath("reference.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def reference_values(key: str, place: float) -> dict[str, float]:
    """A reading of the reference models at a place between the first layer (0) and the last (1); {} if there is none.

    >>> sorted(reference_values("overfocus", 1.0))
    ['DeiT-Ti', 'ViT-Ti (ImageNet-21k)']
    """
    found = {name: model[key] for name, model in reference()["models"].items() if key in model}
    return {name: values[round(place * (len(values) - 1))] for name, values in found.items()}


def threshold_lines(key: str, rows: Sequence[Row]) -> list[tuple[str, list[tuple[float, float]]]]:
    """The thresholds of a reading by layer, each with a name; a share of the bound is multiplied by it."""
    limits = [(one.threshold, one.share_of, one.below) for one in READINGS[key].findings]
    limits += [(NEARLY_UNIFORM, "entropy_bound", False)] if key == "entropy" else []
    lines = []
    for limit, of, below in limits:
        drawn = [row for row in rows if key in row and (not of or of in row)]
        points = [(row["layer"], limit * (row[of] if of else 1.0)) for row in drawn]
        lines.append((f"threshold: {'low' if below else 'high'}", points))
    return lines


def known_band(key: str, rows: Sequence[Row], depth: int, against: str | None) -> list[tuple[float, float, float]]:
    """The range of the reference models' readings at the depth of each layer, as (layer, low, high)."""
    if depth < 2 or (key == "stability" and against != reference()["against"]):
        return []
    band = []
    for row in rows:
        values = reference_values(key, Situation(depth=depth).place(row)).values() if key in row else ()
        scale = row.get("entropy_bound", 0.0) if key.startswith("entropy") else 1.0
        if values and scale:
            band.append((float(row["layer"]), scale * min(values), scale * max(values)))
    return band


#: What the band is called.
KNOWN = "DeiT-Ti and ViT-Ti, for comparison"


def _reference(key: str, place: float, factor: float, form: str, unit: str, more: str = "") -> str:
    """The reference models' values at the same depth."""
    known = [f"{name} {factor * value:{form}}{unit}" for name, value in reference_values(key, place).items()]
    if not known:
        return ""
    said = f"For comparison, at this depth: {' and '.join(known)}"
    return f"{said}; {more}." if more else f"{said}."


def _entropy_share(row: Row) -> float:
    return float(row["entropy"] / row["entropy_bound"]) if row.get("entropy_bound") and "entropy" in row else 0.0


def _span(values: Sequence[float], factor: float = 1.0, form: str = ".2f") -> str:
    """The range of some values as text.

    >>> _span([0.5, 0.25], 100, ".0f")
    '25 to 50'
    """
    low, high = (format(factor * value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def nearly_uniform(rows: Sequence[Row]) -> bool:
    """Whether the mean entropy over the layers is close to its bound."""
    shares = [share for row in rows if (share := _entropy_share(row))]
    return bool(shares) and sum(shares) / len(shares) >= NEARLY_UNIFORM


def uniform_note(rows_by_name: Mapping[str, Sequence[Row]]) -> str:
    """A sentence on the models whose attention is nearly uniform, which makes two readings look good; empty for none.

    >>> uniform_note({"a": [{"entropy": 4.1, "entropy_bound": 4.2}], "b": [{"entropy": 2.1, "entropy_bound": 4.2}]})
    'a: attention is nearly uniform, which alone lowers overfocus and raises stability.'
    """
    found = ", ".join(name for name, rows in rows_by_name.items() if nearly_uniform(rows))
    return f"{found}: attention is nearly uniform, which alone lowers overfocus and raises stability." if found else ""


def _unread(rows: Sequence[Row]) -> list[str]:
    """One sentence for each kind of layer that has no token-to-token map."""
    says = {
        "none": "{} no attention (an MLP or pooling mixes the tokens): there is nothing to read.",
        "channel": "{} attention between channels, not between tokens: there is no token map to read.",
        "outlook": "{} outlook attention, which weighs a local window without queries and keys: there is no token map.",
        "linear": "{} linear attention, which has no softmax over scores of tokens: there is no token map to read.",
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


def _under(against: str | None) -> str:
    return f"against {against}" if against in (SECOND, None) else f"under {against}"


def _layers(layers: Iterable[int]) -> str:
    """Layer numbers in words.

    >>> _layers([3]), _layers([0, 1, 2, 7])
    ('Layer 3', 'Layers 0–2 and 7')
    """
    numbers = sorted(layers)
    parts = ranges(numbers)
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"Layer {joined}" if len(numbers) == 1 else f"Layers {joined}"
