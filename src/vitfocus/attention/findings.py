"""What stands out in a diagnosis: the reading, a reference, what it may mean, the evidence, and what to do next.

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

from vitfocus.attention.capture import WITHOUT_TOKEN_MAP
from vitfocus.attention.readings import READINGS, LayerRow, Threshold
from vitfocus.core.tables import ranges

#: What a diagnosis against a second set of images, not a named corruption, calls it.
SECOND = "the second images"
#: Mean entropy as a share of its bound from which a layer is called nearly uniform.
NEARLY_UNIFORM = 0.95


@dataclass(frozen=True)
class Situation:
    """What the advice depends on.

    Attributes:
        treatments: the specs of the model's treatments.
        trained: whether its weights are trained.
        against: the corruption, or the second images.
        depth: the model's number of blocks.
    """

    treatments: tuple[str, ...] = ()
    trained: bool = True
    against: str | None = None
    depth: int = 0


@dataclass(frozen=True)
class Finding:
    """One finding. `str` joins its sentences.

    Attributes:
        kind: the name of the threshold, or another short name.
        layers: the layers it is about.
        read: what was measured.
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
        sentences = [self.read, self.reference, self.meaning, self.evidence]
        return " ".join(filter(None, [*sentences, f"Next: {self.command}" if self.command else ""]))

    @property
    def explanation(self) -> str:
        """Everything but what was read."""
        return str(replace(self, read=""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"layers": list(self.layers)}


@dataclass(frozen=True)
class Advice:
    """What is known about treating a finding, for models that have one of the `treatments` and for models without."""

    treatments: tuple[str, ...] = ()
    purpose: str = ""
    evidence: str = ""
    command: str = ""


_EXPLORE = "look at them: `vitfocus diagnose MODEL --images DIR --explore --out DIR`"
_OVERFOCUS = Advice(
    ("tap", "adl"),
    "reduce this",
    "Our study found no gain from adding TAP or ADL to trained weights: in a short fine-tuning of DeiT-Ti (plain "
    "80.87 %), ADL cost 0.52 points of accuracy (95 % interval 0.19 to 0.86), and TAP made no significant difference. "
    "From scratch both helped a baseline that trained badly; the "
    'docs\' page "Should I use it?" says what is known about a good one.',
    "measure whether it matters: `vitfocus evaluate MODEL --suite imagenet-c --data DIR`. If you trained the model and "
    "its accuracy is poor, try a lower learning rate first.",
)
_UNIFORM = Advice(
    ("cb", "cbs"),
    "supply uniform attention directly",
    "Context Broadcasting supplies this part directly, but in short trainings our study could not tell whether it "
    'helps: no significant difference, from scratch or in fine-tuning. The docs say what else is known ("Should I use '
    'it?").',
    "nothing to treat in trained weights. If you train from scratch, compare with and without `cb(layers=upper)` over "
    "several seeds.",
)
_HIGH_NORM = Advice(
    ("registers", "ttr"),
    "take these activations",
    "Test-time registers move these activations to an added token without training; registers are trained to take "
    "them. Their authors report cleaner maps of large models. In two small models of our study, test-time registers "
    "removed most of these tokens, and neither accuracy nor robustness rose.",
    f"{_EXPLORE} (rings mark them). To try it: `vf.treat_(model, vf.find_registers(model, images))`, then diagnose "
    "and evaluate again.",
)
#: What each finding may mean, and the advice on it.
_EXPLANATIONS: dict[str, tuple[str, Advice]] = {
    "uniform": (
        "The attention is nearly uniform: these layers average the tokens. Low overfocus and high stability follow "
        "from this alone and are no sign of robustness.",
        _UNIFORM,
    ),
    "spread": ("Softmax learns uniform rows poorly.", _UNIFORM),
    "unstable": ("What these layers attend to depends on the noise.", _OVERFOCUS),
    "alike_rows": ("All queries attend to the same tokens, though these are not few.", _OVERFOCUS),
    "alike_heads": (
        "The heads do much the same; some may be redundant.",
        Advice(evidence="No treatment here addresses this alone.", command=f"{_EXPLORE}."),
    ),
    "narrow": (
        "This is common in early layers, which attend to neighbours or to single tokens.",
        Advice(evidence="It is not a fault in itself.", command=f"{_EXPLORE}."),
    ),
    "high_norm": (
        "Large models keep global information in such tokens, usually in patches that show little, and lose what "
        "these patches show.",
        _HIGH_NORM,
    ),
}


def default_thresholds() -> dict[str, float]:
    """The value from which on each finding is reported, by its name.

    >>> default_thresholds()["overfocus"]
    0.3
    """
    found = {one.name: one.value for reading in READINGS.values() for one in reading.thresholds}
    return found | {"uniform": NEARLY_UNIFORM}


def thresholds_of(key: str) -> list[tuple[float, str, bool]]:
    """The thresholds of a reading: value, the key of what the reading is divided by, and whether low values count."""
    found = [(one.value, one.share_of, one.below) for one in READINGS[key].thresholds]
    return [*found, (NEARLY_UNIFORM, "entropy_bound", False)] if key == "entropy" else found


def findings(
    rows: Sequence[LayerRow], against: str | None = None, thresholds: Mapping[str, float] | None = None
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
    rows: Sequence[LayerRow], situation: Situation, thresholds: Mapping[str, float] | None = None
) -> list[Finding]:
    """The findings for these rows in a situation, the most important first; no layer is overfocused and uniform."""
    limits = default_thresholds() | dict(thresholds or {})
    read = [row for row in rows if "entropy" in row or "overfocus" in row]
    found = [Finding("unread", (), sentence) for sentence in _unread(rows)]
    if read and not situation.trained:
        found.append(
            Finding(
                "untrained",
                tuple(row["layer"] for row in read),
                "The weights are untrained.",
                meaning="Attention at initialisation is close to uniform and says nothing about the trained model.",
                command="load weights (`--weights FILE` or `--pretrained`), or train first.",
            )
        )
    overfocused = [row for row in read if row.get("overfocus", 0) >= limits["overfocus"]]
    uniform = [row for row in read if row not in overfocused and _entropy_share(row) >= limits["uniform"]]
    if overfocused:
        found.append(_overfocus_finding(overfocused, situation))
    if uniform:
        shares = _span([_entropy_share(row) for row in uniform], 100, ".0f")
        text = f"the mean entropy is {shares} % of that of uniform attention."
        found.append(_finding("uniform", "entropy", text, uniform, max(uniform, key=_entropy_share), situation))
    # What follows from overfocus or from uniform attention is not reported again for the same layers.
    over, flat = {row["layer"] for row in overfocused}, {row["layer"] for row in uniform}
    reported = {"spread": over | flat, "alike_rows": over, "unstable": over, "alike_heads": flat}
    for key, reading in READINGS.items():
        for threshold in reading.thresholds:
            skipped, limit = reported.get(threshold.name, ()), limits[threshold.name]
            held = [row for row in read if threshold.holds(row, key, limit) and row["layer"] not in skipped]
            if threshold.sentence and held:
                found.append(_threshold_finding(held, key, threshold, situation))
    if read and not found:
        found.append(Finding("nothing", (), "Nothing stands out by the default thresholds."))
    return found


def _overfocus_finding(rows: Sequence[LayerRow], situation: Situation) -> Finding:
    """The overfocused layers in one finding, the most overfocused first."""
    worst, *others = sorted(rows, key=lambda row: -float(row["overfocus"]))
    text = f"Layer {worst['layer']}: 5 % of the tokens receive {100 * worst['overfocus']:.0f} % of the attention"
    if situation.against and "stability" in worst:
        text += f"; {_under(situation.against)} its maps have a cosine similarity of {worst['stability']:.2f} with the "
        text += "clean ones"
    if others:
        text += f". {_layers(others)}: {_span([row['overfocus'] for row in others], 100, '.0f')} %"
    alike = [row["diversity_official"] for row in rows if "diversity_official" in row]
    similarity = f" (similarity of rows {_span(alike)})" if alike else ""
    return Finding(
        "overfocus",
        tuple(sorted(row["layer"] for row in rows)),
        f"{text}.",
        _reference("overfocus", worst, situation, "; uniform attention has 5 %"),
        f"Nearly all queries attend to the same few tokens{similarity}: if noise changes these tokens, it changes "
        "everything that follows. In a failed training run, the same reading means that attention collapsed.",
        *_advise(_OVERFOCUS, situation),
    )


def _threshold_finding(rows: Sequence[LayerRow], key: str, threshold: Threshold, situation: Situation) -> Finding:
    """The finding of a threshold, for all layers of which its sentence is true."""
    shares = [row[key] / row[threshold.share_of] if threshold.share_of else row[key] for row in rows]
    text = threshold.sentence.format(
        _span([row[key] for row in rows], form=READINGS[key].format),
        bound=max(row.get("entropy_bound", 0.0) for row in rows),
        under=_under(situation.against),
        share=f"{_span(shares, 100, '.0f')} %",
    )
    furthest = rows[shares.index((min if threshold.below else max)(shares))]
    return _finding(threshold.name, key, text, rows, furthest, situation)


def _finding(
    kind: str, key: str, text: str, rows: Sequence[LayerRow], furthest: LayerRow, situation: Situation
) -> Finding:
    """A finding for some layers; the reference is given for the layer that is `furthest` from the usual."""
    meaning, advice = _EXPLANATIONS.get(kind, ("", Advice(command=f"{_EXPLORE}.")))
    layers = tuple(row["layer"] for row in rows)
    known = _reference(key, furthest, situation)
    return Finding(kind, layers, f"{_layers(rows)}: {text}", known, meaning, *_advise(advice, situation))


def _advise(advice: Advice, situation: Situation) -> tuple[str, str]:
    """The evidence and the next step."""
    present = [spec for spec in situation.treatments if spec.partition("(")[0] in advice.treatments]
    if present:
        return (
            f"The model was treated with {' and '.join(present)}, meant to {advice.purpose}.",
            "compare with the untreated model: `vitfocus report RUN_PLAIN RUN_TREATED`.",
        )
    return (advice.evidence, advice.command) if situation.trained or not advice.treatments else ("", "")


@functools.cache
def reference() -> dict[str, Any]:
    """The readings of well-known models by layer, for comparison."""
    text = importlib.resources.files("vitfocus.attention").joinpath("reference.json").read_text("utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def relative_depth(row: LayerRow, depth: int) -> float:
    """Where a layer is between the first (0) and the last (1) of `depth` blocks."""
    return min(row["layer"] / (depth - 1), 1.0) if depth > 1 else 1.0


def reference_values(key: str, place: float) -> dict[str, float]:
    """A reading of the reference models at a relative depth; entropies are shares of their bound; {} if there is none.

    >>> sorted(reference_values("overfocus", 1.0))
    ['DeiT-Ti', 'ViT-Ti (ImageNet-21k)']
    """
    found = {name: model[key] for name, model in reference()["models"].items() if key in model}
    return {name: values[round(place * (len(values) - 1))] for name, values in found.items()}


def _reference(key: str, row: LayerRow, situation: Situation, more: str = "") -> str:
    """The reference models' values at the depth of a layer, in a sentence."""
    if key == "stability" and situation.against != reference()["against"]:
        return ""
    values = reference_values(key, relative_depth(row, situation.depth))
    form = ".0%" if key == "overfocus" or key.startswith("entropy") else READINGS[key].format
    known = [f"{name} {value:{form}}".replace("%", " %") for name, value in values.items()]
    return f"For comparison, at this depth: {' and '.join(known)}{more}." if known else ""


def _entropy_share(row: LayerRow) -> float:
    return float(row["entropy"] / row["entropy_bound"]) if row.get("entropy_bound") and "entropy" in row else 0.0


def _span(values: Sequence[float], factor: float = 1.0, form: str = ".2f") -> str:
    """The range of some values as text.

    >>> _span([0.5, 0.25], 100, ".0f")
    '25 to 50'
    """
    low, high = (format(factor * value, form).replace("%", " %") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def uniform_note(rows_by_name: Mapping[str, Sequence[LayerRow]]) -> str:
    """A sentence on the models whose attention is nearly uniform, which makes two readings look good; empty for none.

    >>> uniform_note({"a": [{"entropy": 4.1, "entropy_bound": 4.2}], "b": [{"entropy": 2.1, "entropy_bound": 4.2}]})
    'a: attention is nearly uniform, which alone lowers overfocus and raises stability.'
    """
    uniform = []
    for name, rows in rows_by_name.items():
        shares = [share for row in rows if (share := _entropy_share(row))]
        if shares and sum(shares) / len(shares) >= NEARLY_UNIFORM:
            uniform.append(name)
    names = ", ".join(uniform)
    return f"{names}: attention is nearly uniform, which alone lowers overfocus and raises stability." if names else ""


def _unread(rows: Sequence[LayerRow]) -> list[str]:
    """One sentence for each kind of layer that has no token-to-token map."""
    endings = {kind: f"{what}: there is no token map to read." for kind, what in WITHOUT_TOKEN_MAP.items()}
    endings["class"] = "class attention: only the class token attends, so distance and row similarity have no meaning."
    sentences = []
    for kind, ending in endings.items():
        if layers := [row for row in rows if row.get("attention_kind") == kind]:
            sentences.append(f"{_layers(layers)} {'has' if len(layers) == 1 else 'have'} {ending}")
    unseen = [
        row
        for row in rows
        if row.get("attention_kind") not in endings and "entropy" not in row and "overfocus" not in row
    ]
    if unseen:
        sentences.append(f"{_layers(unseen)}: the attention could not be observed, so there are no numbers.")
    return sentences


def _under(against: str | None) -> str:
    return f"against {against}" if against in (SECOND, None) else f"under {against}"


def _layers(rows: Iterable[LayerRow]) -> str:
    """The layers of some rows in words.

    >>> _layers([{"layer": 3}]), _layers([{"layer": layer} for layer in (0, 1, 2, 7)])
    ('Layer 3', 'Layers 0–2 and 7')
    """
    numbers = sorted(row["layer"] for row in rows)
    *first, last = ranges(numbers)
    joined = f"{', '.join(first)} and {last}" if first else last
    return f"Layer {joined}" if len(numbers) == 1 else f"Layers {joined}"
