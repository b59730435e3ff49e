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
from reporting.situations import one_camvid_run, situations

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
    "plain-longer": "longer plain training (for as long as TAP + ADL take)",
    "all": "CB_S + TAP + ADL",
}
PLACES = {
    "vit-s": "ViT-S/4",
    "vit-ti": "ViT-Ti/4",
    "fine-tune": "DeiT-Ti fine-tuned for 10 epochs",
    "camvid": "UperNet with DeiT-Ti on CamVid",
}
OUTCOMES = (
    "Plain and treated are means over the same seeds. The 95 % intervals are not corrected for the number of "
    "comparisons, so an interval without 0 can belong to an undecided effect. Higher and lower: significant at 5 % "
    "after Holm's correction for all planned comparisons. Within ±0.5 points: all planned seeds are finished, and the "
    "90 % interval (not corrected) lies between these bounds. Undecided: neither."
)
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
    if not (values := _plain(found)):
        return text
    return HEADER.sub(lambda _: f"# Plain ViT-S/4 {_reaches(values, 'on the test images ')}.\n", text)


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
        "situations": situations(by, found),
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


def _measure(row: Row) -> str:
    """What a comparison is about, in words."""
    dense = row["group"] == "camvid"
    return MEASURES[row["metric"]].replace("accuracy", "mIoU" if dense else "accuracy")


def sentence(row: Row) -> str:
    """What may be said of a comparison: no difference from one seed, no claim without significance or equivalence."""
    arm, measure = ARMS[row["arm"]], _measure(row)
    if row["outcome"] == "not run":
        return f"The effect of {arm} on {measure} was not measured."
    if not row["seeds"]:
        return f"The effect of {arm} on {measure} is not known: no seed has a run both with and without it."
    if row["seeds"] == 1:
        return (
            f"The effect of {arm} on {measure} is not known: one of the {row['planned']} planned seeds is finished "
            f"({row['value']:.2f} %, plain {row['plain']:.2f} %)."
        )
    low, high = row["interval"]
    if row["outcome"] == "higher":
        said = f"{arm} raised {measure}"
    elif row["outcome"] == "lower":
        said = f"{arm} lowered {measure}"
    elif row["outcome"] == "undecided":
        said = f"the effect of {arm} on {measure} is undecided"
        said += " (not significant after Holm's correction for multiple comparisons)" if low > 0 or high < 0 else ""
    else:  # a bound
        said = f"the effect of {arm} on {measure} is {row['outcome']} (90 % interval)"
    seeds = f"{row['seeds']} of {row['planned']} planned seeds"
    return f"{said[0].upper()}{said[1:]}: {difference(row)} points from plain's {row['plain']:.2f} % ({seeds})."


def _conclusion(
    tiers: Mapping[str, tuple[int, int]],
    found: Results,
    rows: Sequence[Row],
    by: Mapping[tuple[str, str, str], Row],
    costs: Mapping[str, Any],
) -> list[str]:
    cb = by["vit-s", "cb-upper", "clean.accuracy"]
    paper = ""
    if "interval" in cb:
        inside = cb["interval"][0] <= PAPER_GAIN <= cb["interval"][1]
        paper = f" The +{PAPER_GAIN:.2f} of the CB paper is {'inside' if inside else 'outside'} this interval."
    said = [
        f"**Baseline.** Plain ViT-S/4 {_reaches(_plain(found))}; the CB paper reports {PAPER:.2f} % and states "
        "neither the patch size nor the length of training.",
        f"**TAP + ADL.** {sentence(by['vit-s', 'tap-adl', 'clean.accuracy'])} {_step('tap-adl', costs)}",
        f"**CB.** {sentence(cb)}{paper}",
        "**Robustness beyond clean accuracy.** "
        + " ".join(sentence(by["vit-s", arm, "kept"]) for arm in ("tap-adl", "cb-upper")),
        f"**Still open.** {_still_open(rows)}",
    ]
    return [one.replace("CB_S", "CB\\_S") for one in said]


def _reaches(plain: Mapping[int, float], where: str = "") -> str:
    """What plain reaches, with every seed.

    >>> _reaches({0: 76.0, 1: 75.96}), _reaches({2: 75.5})
    ('reaches 75.98 % (mean of seeds 0 and 1: 76.00 and 75.96 %)', 'reaches 75.50 % (seed 2 alone)')
    """
    if not plain:
        return "has no finished run"
    each = f"seed {next(iter(plain))} alone"
    if len(plain) > 1:
        each = f"mean of seeds {_listed(plain)}: {_listed(f'{value:.2f}' for value in plain.values())} %"
    return f"reaches {fmean(plain.values()):.2f} % {where}({each})"


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
            ("vit-s", "recorded as a CUDA graph, as trained here"),
            ("vit-s, compiled", "in your own loop with compiled blocks"),
            ("vit-s, eager", "eager"),
        )
        if arm in costs.get(key, {})
    }
    if not ratios:
        return f"The cost of a training step with {ARMS[arm]} was not measured with this recipe."
    times = _listed(f"{ratio:.2f} times ({words})" for words, ratio in ratios.items())
    return f"With {ARMS[arm]}, a training step takes {times} as long as plain's on {costs['device']}."


def _still_open(rows: Sequence[Row]) -> str:
    """Which planned comparisons say nothing yet."""
    states = {
        "Not measured": [row for row in rows if row["outcome"] == "not run"],
        "No common seed": [row for row in rows if row["outcome"] == "no common seed"],
        "One seed": [row for row in rows if row["seeds"] == 1],
        "Undecided": [row for row in rows if row["outcome"] == "undecided"],
    }
    said = []
    for state, some in states.items():
        parts = []
        for group in dict.fromkeys(row["group"] for row in some):
            for measure in dict.fromkeys(_measure(row) for row in some if row["group"] == group):
                arms = [ARMS[row["arm"]] for row in some if (row["group"], _measure(row)) == (group, measure)]
                parts.append(f"{PLACES[group]}, {measure}: {', '.join(arms)}")
        said += [f"*{state}:* {'; '.join(parts)}."] if parts else []
    return " ".join(said) or "None of the planned comparisons."


def _progress(tiers: Mapping[str, tuple[int, int]], rows: Sequence[Row]) -> str:
    begun = [row for row in rows if row["seeds"]]
    parts = [f"{_runs(tiers)}. Comparisons with a run of both arms: {len(begun)} of {len(rows)}."]
    return "\n\n".join(parts + ([comparisons(begun)] if begun else []))


def _headline(
    first: tuple[int, int], found: Results, accuracy: Sequence[Row], kept: Sequence[Row], rows: Sequence[Row]
) -> str:
    shown, (done, planned) = [row for row in (*accuracy, *kept) if row["seeds"]], first
    decided = [row for row in shown if row["seeds"] > 1 and row["outcome"] != "undecided"]
    runs = "runs that compare it with CB in the upper half of the layers and with TAP + ADL"
    so_far = f"so far, {done} of the {planned} {runs} {'is' if done == 1 else 'are'} finished"
    said = (
        ("" if decided else "What to expect of the treatments over a well-trained plain model is not known yet. ")
        + "A study at the accuracy of the CB paper trains ViT-S/4 on CIFAR-100 for 200 epochs. Plain "
        + f"{_reaches(_plain(found))}; {so_far if done < planned else f'all {planned} {runs} are finished'}"
    )
    rest = sum(row["seeds"] < 2 for row in rows)
    few = f"Of the {len(rows)} planned comparisons, {rest} {'has' if rest == 1 else 'have'} fewer than two seeds."
    last = " ".join(filter(None, [_legend(shown), few * (rest > 0)]))
    return "\n\n".join(filter(None, [said + (":" if shown else "."), _shown(shown), last]))


def _legend(rows: Sequence[Row]) -> str:
    """What the outcomes of a table mean, once there are any."""
    return OUTCOMES if any(row["seeds"] > 1 for row in rows) else ""


def _shown(rows: Sequence[Row], group: str = "") -> str:
    """The comparisons that have runs, of one group or of all, as a table."""
    body = [
        [
            ARMS[row["arm"]],
            _measure(row),
            f"{row['plain']:.2f}",
            f"{row['value']:.2f}",
            difference(row) or "–",
            f"{row['seeds']} of {row['planned']}",
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
    parts = [
        f"*At the paper's accuracy:* ViT-S/4 with the recipe `cifar100` (the optimiser Muon, 200 epochs). Plain "
        f"{_reaches(_plain(found))}. {first[0]} of the {first[1]} runs with plain, CB in the upper half of the layers "
        f"and TAP + ADL {'is' if first[0] == 1 else 'are'} finished."
    ]
    if shown := _shown(rows, "vit-s"):
        here = [row for row in rows if row["group"] == "vit-s"]
        parts += [shown, " ".join(filter(None, [_legend(here), _step("tap-adl", costs)]))]
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
            "*Ten epochs, ADL with a warm-up of three epochs* (the same weights and image size):",
            shown,
            "*Not measured:* larger models, other data.",
        ]
    )


def _dense(rows: Sequence[Row], found: Results) -> str:
    shown = _shown(rows, "camvid")
    if not shown:
        return (
            f"*Measured once:* UperNet with a trained DeiT-Ti, {one_camvid_run()}; "
            "`benchmarks/results/camvid-cuda.json` has the command.\n\n"
            "*Not measured:* several seeds, CB, CB\\_S, detection, other data. [Tasks](tasks.md) shows how to run them."
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
