"""What README.md, the docs and the study's own README say about the long study, written from its results.

Each of these files has pairs of marks with a name; `update` writes the text of that name between them. A comparison
becomes a sentence by its outcome alone, so that no sentence can say more than the analysis: with one common seed there
are two values and no difference, and without Holm's correction there is no claim.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting.long import Results, comparisons, difference
from reporting.readme import table

Row = Mapping[str, Any]
#: The paper's accuracy of the plain model and gain by CB (CB supplement, Table S4).
PAPER, PAPER_GAIN = 74.73, 0.70
MEASURES = {
    "clean.accuracy": "clean accuracy",
    "kept": "the share of accuracy kept under corruption",
    "clean.miou": "mIoU",
}
#: Arms in words, for sentences.
ARMS = {
    "cb-upper": "CB in the upper half",
    "tap-adl": "TAP + ADL",
    "cbs": "CB_S",
    "tap": "TAP",
    "adl": "ADL",
    "average3": "a fixed 3 × 3 average",
    "plain-longer": "plain trained for as long as TAP + ADL",
    "all": "CB_S + TAP + ADL",
}
PLACES = {"vit-s": "ViT-S/4", "vit-ti": "ViT-Ti/4", "fine-tune": "DeiT-Ti fine-tuned for 10 epochs", "camvid": "CamVid"}
#: The first line of the recipe `cifar100`.
HEADER = re.compile(r"\A# Plain ViT-S/4 reaches [^\n]*\n")


def begin(name: str) -> str:
    """The mark before a text."""
    return f"<!-- long study, {name}: written by `tiers.py report`; changes up to the next mark are lost -->"


END = "<!-- end of the long study -->"


def update(text: str, texts: Mapping[str, str]) -> str:
    """A file's content with the texts between its marks; an unknown name is an error.

    >>> old = f"a\\n\\n{begin('x')}\\n\\nold\\n\\n{END}\\n\\nb"
    >>> print(update(old, {"x": "new"}).replace(begin("x"), "MARK").replace(END, "END"), end="")
    a
    <BLANKLINE>
    MARK
    <BLANKLINE>
    new
    <BLANKLINE>
    END
    <BLANKLINE>
    b
    """
    pattern = re.compile(re.escape(begin("NAME")).replace("NAME", r"([^:\n]+)") + r".*?" + re.escape(END), re.S)
    return pattern.sub(lambda found: f"{begin(found[1])}\n\n{wrap(texts[found[1]])}\n\n{END}", text)


def wrap(text: str) -> str:
    """Paragraphs and numbered sentences broken into lines; tables stay as they are."""
    lines = []
    for line in text.split("\n"):
        number = re.match(r"\d+\. ", line)
        after = " " * len(number[0]) if number else ""
        together = line.replace(" %", "\0%").replace(", +", ",\0+").replace(", −", ",\0−")
        whole = not line or line.startswith("|")
        lines += (
            [line]
            if whole
            else textwrap.wrap(together, 130, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines).replace("\0", " ")


def targets(root: Path) -> list[Path]:
    """The files of the repository with such texts."""
    return [root / "README.md", root / "docs" / "should-i-use-it.md", root / "studies" / "cifar100" / "README.md"]


def recipe(root: Path) -> Path:
    """The recipe whose first line states the accuracy of plain."""
    return root / "src" / "vitfocus" / "recipes" / "cifar100.toml"


def update_recipe(text: str, found: Results) -> str:
    """The recipe with plain's accuracy in its first line."""
    values = _plain(found)
    seeds = ", ".join(f"{value:.2f} % with seed {seed}" for seed, value in values.items())
    return HEADER.sub(
        lambda _: f"# Plain ViT-S/4 reaches {fmean(values.values()):.2f} % on the test images ({seeds}).\n", text
    )


def texts(
    tiers: Mapping[str, tuple[int, int]], found: Results, rows: Sequence[Row], costs: Mapping[str, Any]
) -> dict[str, str]:
    """All texts by name.

    Args:
        tiers: For each tier in words, its finished and planned runs.
        found: The finished runs, by group, arm and seed.
        rows: The analysed comparisons of `tiers.analyse`.
        costs: The content of cost.json.
    """
    by = {(row["group"], row["arm"], row["metric"]): row for row in rows}
    tap, cb = by["vit-s", "tap-adl", "clean.accuracy"], by["vit-s", "cb-upper", "clean.accuracy"]
    kept = [by["vit-s", arm, "kept"] for arm in ("tap-adl", "cb-upper")]
    first = next(iter(tiers.values()))
    return {
        "conclusion": "\n".join(f"{i}. {one}" for i, one in enumerate(_conclusion(tiers, found, rows, by, costs), 1)),
        "progress": _progress(tiers, rows),
        "headline": _headline(first, found, [tap, cb], kept, rows),
        "situations": _situations(by),
        "from scratch": _scratch(first, found, rows, costs),
        "fine-tuning": _fine_tuning(rows, found),
        "dense prediction": _dense(rows, found),
        "robustness": _robustness(kept),
    }


def _plain(found: Results) -> dict[int, float]:
    """The accuracy of plain ViT-S/4 by seed."""
    return {
        seed: one["clean"]["accuracy"]
        for (group, arm, seed), one in sorted(found.items())
        if (group, arm) == ("vit-s", "plain")
    }


def sentence(row: Row) -> str:
    """What may be said of a comparison: no difference from one seed, no claim without significance or equivalence."""
    arm, measure = ARMS[row["arm"]], MEASURES[row["metric"]]
    if not row["seeds"]:
        return f"The effect of {arm} on {measure} was not measured."
    if row["seeds"] == 1:
        return (
            f"The effect of {arm} on {measure} is not known: there is one seed ({row['value']:.2f} %, plain "
            f"{row['plain']:.2f} %)."
        )
    low, high = row["interval"]
    open_ones = "undecided" + (" (not significant after Holm's correction)" if low > 0 or high < 0 else "")
    said = {
        "higher": f"{arm} raised {measure}",
        "lower": f"{arm} lowered {measure}",
        "no effect": f"{arm} did not change {measure} (90 % interval within ±0.5 points)",
        "undecided": f"the effect of {arm} on {measure} is {open_ones}",
    }[row["outcome"]]
    effect = f"{difference(row)} points from plain's {row['plain']:.2f} % ({row['seeds']} seeds)"
    return f"{said[0].upper()}{said[1:]}: {effect}."


def _conclusion(
    tiers: Mapping[str, tuple[int, int]],
    found: Results,
    rows: Sequence[Row],
    by: Mapping[tuple[str, str, str], Row],
    costs: Mapping[str, Any],
) -> list[str]:
    plain = _plain(found)
    mean = fmean(plain.values())
    cb = by["vit-s", "cb-upper", "clean.accuracy"]
    paper = ""
    if "interval" in cb:
        inside = cb["interval"][0] <= PAPER_GAIN <= cb["interval"][1]
        paper = f" The +{PAPER_GAIN:.2f} of the CB paper is {'inside' if inside else 'outside'} this interval."
    sound = "The baseline is sound" if mean >= PAPER else "The baseline is below that of the paper"
    said = [
        f"**{sound}.** Plain ViT-S/4 reaches {mean:.2f} % ({_seeds(plain)}); the CB paper reports {PAPER:.2f} %.",
        f"**TAP + ADL.** {sentence(by['vit-s', 'tap-adl', 'clean.accuracy'])} {_step('tap-adl', costs)}",
        f"**CB.** {sentence(cb)}{paper}",
        "**Robustness beyond clean accuracy.** "
        + " ".join(sentence(by["vit-s", arm, "kept"]) for arm in ("tap-adl", "cb-upper")),
        f"**Not known.** {_not_known(rows)}",
    ]
    return [one.replace("CB_S", "CB\\_S") for one in said]


def _seeds(values: Mapping[int, float]) -> str:
    if len(values) == 1:
        return f"seed {next(iter(values))} alone"
    return f"mean of seeds {_listed(values)}: {_listed(f'{value:.2f}' for value in values.values())} %"


def _listed(words: Iterable[object]) -> str:
    """Words joined as in a sentence.

    >>> _listed([0, 1, 2]), _listed(["alone"])
    ('0, 1 and 2', 'alone')
    """
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def _runs(tiers: Mapping[str, tuple[int, int]]) -> str:
    return "Finished runs: " + ", ".join(f"{done} of {planned} ({name})" for name, (done, planned) in tiers.items())


def _step(arm: str, costs: Mapping[str, Any]) -> str:
    """What a step with the arm takes, if measured."""
    ratios = {
        words: costs[key][arm]["ratio"]
        for key, words in (
            ("vit-s", "as trained"),
            ("vit-s, compiled", "compiled in your own loop"),
            ("vit-s, eager", "eager"),
        )
        if arm in costs.get(key, {})
    }
    if not ratios:
        return "The cost of a training step was not measured with this recipe."
    return (
        "A training step takes "
        + ", ".join(f"{ratio:.2f} ({words})" for words, ratio in ratios.items())
        + " times plain's."
    )


def _not_known(rows: Sequence[Row]) -> str:
    """Which comparisons say nothing yet."""
    states = {
        "Not measured": [row for row in rows if row["seeds"] == 0],
        "One seed": [row for row in rows if row["seeds"] == 1],
        "Undecided": [row for row in rows if row["outcome"] == "undecided"],
    }
    said = []
    for state, some in states.items():
        parts = []
        for group in dict.fromkeys(row["group"] for row in some):
            for metric in dict.fromkeys(row["metric"] for row in some if row["group"] == group):
                arms = [ARMS[row["arm"]] for row in some if (row["group"], row["metric"]) == (group, metric)]
                parts.append(f"{PLACES[group]}, {MEASURES[metric]} ({', '.join(arms)})")
        said += [f"{state}: {'; '.join(parts)}."] if parts else []
    return " ".join(said) or "Every planned comparison is decided."


def _progress(tiers: Mapping[str, tuple[int, int]], rows: Sequence[Row]) -> str:
    begun = [row for row in rows if row["seeds"]]
    parts = [f"{_runs(tiers)}. Of the {len(rows)} planned comparisons, {len(begun)} have runs of both arms."]
    return "\n\n".join(parts + ([comparisons(begun)] if begun else []))


def _headline(
    first: tuple[int, int], found: Results, accuracy: Sequence[Row], kept: Sequence[Row], rows: Sequence[Row]
) -> str:
    plain, shown = _plain(found), [row for row in (*accuracy, *kept) if row["seeds"]]
    decided = [row for row in shown if row["outcome"] in ("higher", "lower", "no effect")]
    said = (
        "What to expect of the treatments over a well-trained plain model"
        + (" is not known yet" if not decided else "")
        + ". A study at the accuracy of the CB paper trains ViT-S/4 on CIFAR-100 for 200 epochs; plain reaches "
        + f"{fmean(plain.values()):.2f} % ({_seeds(plain)}). {first[0]} of the {first[1]} runs that compare it with CB "
        + "and with TAP + ADL are finished"
    )
    rest = [row for row in rows if row["seeds"] < 2]
    parts = [said + (":" if shown else "."), _shown(shown)] + [sentence(row) for row in decided]
    if rest:
        parts.append(f"Of the {len(rows)} planned comparisons, {len(rest)} have fewer than two seeds.")
    return "\n\n".join(filter(None, parts))


def _verdict(row: Row, otherwise: str) -> str:
    """A cell of the table of situations."""
    if row["seeds"] < 2:
        return otherwise
    return f"{row['outcome']} in a well-trained model ({row['plain']:.1f} %): {difference(row)}"


def _situations(by: Mapping[tuple[str, str, str], Row]) -> str:
    tap, cb = by["vit-s", "tap-adl", "clean.accuracy"], by["vit-s", "cb-upper", "clean.accuracy"]
    tuned = {arm: by["fine-tune", arm, "clean.accuracy"] for arm in ("cbs", "tap", "adl", "all")}
    dense = {arm: by["camvid", arm, "clean.miou"] for arm in ("cbs", "tap-adl")}
    kept = {arm: by["vit-s", arm, "kept"] for arm in ("tap-adl", "cb-upper")}
    rows = [
        [
            "training from scratch on little data",
            "tune the learning rate of the plain model first; " + _verdict(tap, "gain over a good baseline not known"),
            _verdict(cb, "not known"),
            "not measured at a rate at which plain trains well",
        ],
        [
            "training whose attention collapses",
            "lower the learning rate first; TAP + ADL prevented the collapse (two seeds)",
            "CB did not prevent it; CB_S: not measured",
            "qknorm and sigma prevented it, gate and registers did not (two seeds)",
        ],
        [
            "fine-tuning a trained model",
            "do not add ADL for a short fine-tuning; TAP: no significant difference"
            + "".join(
                f"; 10 epochs, {ARMS[arm]}: {_verdict(tuned[arm], '')}"
                for arm in ("tap", "adl")
                if tuned[arm]["seeds"] > 1
            ),
            "CB_S: no significant difference; CB: not measured"
            + (f"; 10 epochs, CB_S: {_verdict(tuned['cbs'], '')}" if tuned["cbs"]["seeds"] > 1 else ""),
            "not measured",
        ],
        [
            "dense prediction",
            _verdict(dense["tap-adl"], "not measured"),
            _verdict(dense["cbs"], "not measured"),
            "not measured",
        ],
        [
            "robustness to corruptions",
            "short training: no gain found beyond that in clean accuracy"
            + ("; accuracy kept: " + _verdict(kept["tap-adl"], "") if kept["tap-adl"]["seeds"] > 1 else ""),
            "short training: no significant change in corruption error"
            + ("; accuracy kept: " + _verdict(kept["cb-upper"], "") if kept["cb-upper"]["seeds"] > 1 else ""),
            "ttr, without training: the mCE of two small models rose a little; others not measured",
        ],
        [
            "high-norm tokens in a trained model",
            "not measured",
            "not measured",
            "ttr removed most of them without training; accuracy did not rise (two small models)",
        ],
    ]
    return table(["your situation", "TAP, ADL", "CB, CB\\_S", "qknorm, sigma, gate, registers, ttr"], rows)


def _shown(rows: Sequence[Row], group: str = "") -> str:
    """The comparisons that have runs, of one group or of all, as a table."""
    body = [
        [
            ARMS[row["arm"]],
            MEASURES[row["metric"]],
            f"{row['plain']:.2f}",
            f"{row['value']:.2f}",
            difference(row) or "–",
            str(row["seeds"]),
            row["outcome"],
        ]
        for row in rows
        if row["group"] == (group or row["group"]) and row["seeds"]
    ]
    return (
        table(["with", "measure", "plain (%)", "treated (%)", "difference [95 % interval]", "seeds", "outcome"], body)
        if body
        else ""
    )


def _scratch(first: tuple[int, int], found: Results, rows: Sequence[Row], costs: Mapping[str, Any]) -> str:
    plain = _plain(found)
    parts = [
        f"*At the paper's accuracy:* ViT-S/4, the recipe `cifar100` (Muon, 200 epochs), {first[0]} of {first[1]} runs "
        f"of the first tier. Plain reaches {fmean(plain.values()):.2f} % ({_seeds(plain)})."
    ]
    if shown := _shown(rows, "vit-s"):
        parts += [shown, f"With TAP + ADL: {_step('tap-adl', costs)[0].lower()}{_step('tap-adl', costs)[1:]}"]
    if not any(row["seeds"] > 1 for row in rows if row["group"] == "vit-s"):
        parts.append(
            "No treatment has two seeds there, so the gain over a well-tuned baseline is *not known*. We expect it "
            "to be far smaller than the gains below."
        )
    if small := _shown(rows, "vit-ti"):
        parts += ["ViT-Ti/4 with the same recipe:", small]
    return "\n\n".join(parts)


def _fine_tuning(rows: Sequence[Row], found: Results) -> str:
    shown = _shown(rows, "fine-tune")
    if not shown:
        return "*Not measured:* more epochs, larger models, other data, ADL with a warm-up (`loss.adl_warmup_epochs`)."
    return "\n\n".join(
        [
            "*Ten epochs, ADL with a warm-up of three* (the same weights and size):",
            shown,
            "*Not measured:* larger models, other data.",
        ]
    )


def _dense(rows: Sequence[Row], found: Results) -> str:
    shown = _shown(rows, "camvid")
    if not shown:
        return (
            "*Not measured.* Segmentation and detection with the treatments run ([Tasks](tasks.md)), but there is no "
            "result here that compares them with a plain model."
        )
    return "\n\n".join(
        [
            "*Measured:* UperNet with a trained DeiT-Ti on CamVid, 2,000 steps, clean and under the corruptions of the "
            "Cityscapes-C protocol.",
            shown,
            "*Not measured:* larger models, other data, detection.",
        ]
    )


def _robustness(kept: Sequence[Row]) -> str:
    if not any(row["seeds"] for row in kept):
        return "*Not known:* the effect on a well-trained model."
    return "*On a well-trained ViT-S/4:* " + " ".join(sentence(row) for row in kept)


def outdated(
    root: Path, counts: Mapping[str, tuple[int, int]], found: Results, rows: Sequence[Row], costs: Mapping[str, Any]
) -> dict[Path, str]:
    """Every file of the repository whose text about the study is not the current one, with what it should contain."""
    written = texts(counts, found, rows, costs)
    new = {path: update(path.read_text(encoding="utf-8"), written) for path in targets(root)}
    new[recipe(root)] = update_recipe(recipe(root).read_text(encoding="utf-8"), found)
    return {path: text for path, text in new.items() if text != path.read_text(encoding="utf-8")}
