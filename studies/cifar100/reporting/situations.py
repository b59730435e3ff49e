"""The table of docs/should-i-use-it.md: what to do by situation, with the numbers of every study beside it.

The short study, the one on test-time registers and a run on CamVid are finished, and their committed results are read
here; what the long study adds comes as its analysed comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting.gathered import Study, gather
from reporting.labels import MODELS, label
from reporting.long import Results, difference, state
from reporting.outcomes import ACCURACY, KEPT, Outcome
from reporting.readme import table
from reporting.words import written
from vitfocus.report.page import minus

STUDIES = Path(__file__).resolve().parents[2]
HEADINGS = ["your situation", "what to do", "TAP, ADL", "CB, CB\\_S", "qknorm, sigma, gate, registers, ttr"]
NOT_MEASURED = "not measured"
#: Models of the study on test-time registers, in words.
REGISTERS = {"deit_tiny_patch16_224": "DeiT-Ti", "vit_tiny_patch16_224": "ViT-Ti"}


def situations(by: Mapping[tuple[str, str, str], Mapping[str, Any]], found: Results) -> str:
    """The table, from the analysed comparisons by group, arm and metric, and the finished runs of the long study."""
    tap, cb = by["vit-s", "tap-adl", "clean.accuracy"], by["vit-s", "cb-upper", "clean.accuracy"]
    tuned = {arm: by["fine-tune", arm, "clean.accuracy"] for arm in ("cbs", "tap", "adl", "all")}
    dense = {arm: by["camvid", arm, "clean.miou"] for arm in ("cbs", "tap-adl")}
    kept = {arm: by["vit-s", arm, "kept"] for arm in ("tap-adl", "cb-upper")}
    rows = [
        [
            "training from scratch on little data",
            "tune the learning rate of the plain model first, then compare on your data",
            f"TAP + ADL, {_from_scratch('tap-adl', ACCURACY)}; 200 epochs, ViT-S: {brief(tap)}",
            f"CB in the upper half, {_from_scratch('cb-upper', ACCURACY)}; 200 epochs, ViT-S: {brief(cb)}",
            "not measured at a rate at which plain trains well",
        ],
        [
            "training whose attention collapses",
            "lower the learning rate or lengthen the warm-up first; if you need the high rate, use TAP + ADL, qknorm "
            "or sigma",
            _collapse(found, {"tap-adl": "TAP + ADL"}),
            f"{_collapse(found, {'cb': 'CB'})}; CB_S: {NOT_MEASURED}",
            _collapse(found, {name: name for name in ("qknorm", "sigma", "gate", "registers")}) + "; ttr: not measured",
        ],
        [
            "fine-tuning a trained model",
            "do not add ADL for a short fine-tuning",
            f"2 epochs: {_tuned(['adl', 'tap'])}; 10 epochs: {_briefs(tuned, {'adl': 'ADL', 'tap': 'TAP'})}",
            f"2 epochs: {_tuned(['cbs'])}; 10 epochs: {_briefs(tuned, {'cbs': 'CB_S'})}; CB: {NOT_MEASURED}",
            NOT_MEASURED,
        ],
        [
            "dense prediction",
            "compare on your own data",
            _briefs(dense, {"tap-adl": "TAP + ADL, mIoU on CamVid"}, one_camvid_run()),
            _briefs(dense, {"cbs": "CB_S, mIoU on CamVid"}),
            NOT_MEASURED,
        ],
        [
            "robustness to corruptions",
            "look at the share of accuracy kept, not at the corruption error alone",
            f"accuracy kept, TAP + ADL, {_from_scratch('tap-adl', KEPT)}; 200 epochs, ViT-S: {brief(kept['tap-adl'])}",
            f"accuracy kept, CB in the upper half, {_from_scratch('cb-upper', KEPT)}; 200 epochs, ViT-S: "
            f"{brief(kept['cb-upper'])}",
            f"mCE without training (lower is better): {_registers('mCE')}; others: {NOT_MEASURED}",
        ],
        [
            "high-norm tokens in a trained model",
            "ttr removes most of them without training; do not expect higher accuracy",
            NOT_MEASURED,
            NOT_MEASURED,
            f"high-norm tokens in the layer with most: {_high_norm()}; accuracy: {_registers('clean')}; others: "
            + NOT_MEASURED,
        ],
    ]
    return table(HEADINGS, rows)


def brief(row: Mapping[str, Any]) -> str:
    """A comparison of the long study in a few words."""
    if row["seeds"] == 0:
        return NOT_MEASURED if row["outcome"] == "not run" else row["outcome"]
    seeds = f"{row['seeds']} of {row['planned']} seeds"
    if row["seeds"] == 1:
        return f"no claim ({seeds})"
    return f"{row['outcome']}, {difference(row)} (plain {row['plain']:.2f} %, {seeds})"


def _briefs(rows: Mapping[str, Mapping[str, Any]], names: Mapping[str, str], otherwise: str = NOT_MEASURED) -> str:
    """Several comparisons with their names; `otherwise` if none of them was run."""
    if not any(rows[arm]["seeds"] for arm in names):
        return otherwise
    return "; ".join(f"{name}: {brief(rows[arm])}" for arm, name in names.items())


@cache
def short_study() -> Study:
    """The runs of the short study."""
    return gather(STUDIES / "cifar100" / "results", {})


def _from_scratch(arm: str, outcome: Outcome) -> str:
    """What an arm of the short study changed in both models; plain ViT-S had failed there."""
    said = []
    for group in ("vit-ti", "vit-s"):
        plain = short_study().estimate(group, "plain", outcome)
        effect = written(short_study().against_plain(group, arm, outcome), outcome, signed=True)
        failed = ", a failed baseline" if group == "vit-s" else ""
        said.append(f"{MODELS[group]} {effect} (plain {outcome.write(plain.mean) if plain else ''} %{failed})")
    return f"20 epochs: {', '.join(said)}"


def _tuned(arms: Sequence[str]) -> str:
    """What arms changed after the short fine-tuning, pooled over all arms."""
    plain = short_study().estimate("fine-tune", "plain", ACCURACY)
    effects = short_study().pooled_against_plain("fine-tune", ACCURACY)
    said = [f"{label(arm).removesuffix(' official')} {written(effects[arm], ACCURACY, signed=True)}" for arm in arms]
    return f"{', '.join(said)} (plain {ACCURACY.write(plain.mean) if plain else ''} %)"


def _collapse(found: Results, arms: Mapping[str, str]) -> str:
    """Whether arms trained where the attention of plain collapses, with the mean accuracy of their seeds."""
    seeds = sum((group, arm) == ("collapse", "plain") for group, arm, _ in found)
    said: dict[str, list[str]] = {}
    for arm, name in arms.items():
        ends = {state(one) for (group, a, _), one in found.items() if (group, a) == ("collapse", arm)}
        if ends:
            verdict = {"trains": "prevented it", "failed": "did not prevent it"}.get("".join(ends), "varied by seed")
            said.setdefault(verdict, []).append(f"{name} ({_accuracy(found, arm)})")
    parts = [f"{_listed(names)} {verdict}" for verdict, names in said.items()]
    if not parts or not seeds:
        return NOT_MEASURED
    return "; ".join(parts) + f"; plain {_accuracy(found, 'plain')} (means of {seeds} seeds)"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _accuracy(found: Results, arm: str) -> str:
    """The mean accuracy of an arm of the group `collapse`, which has runs."""
    values = [one["clean"]["accuracy"] for (group, a, _), one in found.items() if (group, a) == ("collapse", arm)]
    return f"{fmean(values):.2f} %"


@cache
def one_camvid_run() -> str:
    """The mIoU of one short run on CamVid with TAP and ADL, and of plain."""
    path = STUDIES.parent / "benchmarks" / "results" / "camvid-cuda.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    plain, treated = (100 * runs[name]["scores"]["miou"] for name in ("camvid", "camvid_tap_adl"))
    steps = runs["camvid"]["scores"]["step"]
    return (
        f"mIoU on CamVid after {steps} steps, TAP + ADL: {treated:.2f} % (plain {plain:.2f} %, one run each: no claim)"
    )


@cache
def _register_results() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((STUDIES / "registers" / "results.json").read_text(encoding="utf-8"))
    return content


def _registers(name: str) -> str:
    """What test-time registers changed in a number of each model, with its paired interval."""
    said = []
    for model, one in _register_results()["models"].items():
        row = next(row for row in one["comparison"]["rows"] if row["name"] == name)
        low, high = row["interval"]
        plain = one["plain"]["top1" if name == "clean" else "mce"]
        effect = minus(f"{row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]")
        said.append(f"{REGISTERS.get(model, model)} {effect} (plain {plain:.1f} %)")
    return f"ttr, {', '.join(said)}"


def _high_norm() -> str:
    """How many tokens have a high norm before and with test-time registers, in the layer where they are most."""
    said = []
    for model, one in _register_results()["models"].items():
        before, after = (100 * max(one[name]["readings"]["high_norm"]) for name in ("plain", "ttr"))
        said.append(f"{REGISTERS.get(model, model)} {before:.2f} % to {after:.2f} %")
    return f"ttr, {', '.join(said)}"
