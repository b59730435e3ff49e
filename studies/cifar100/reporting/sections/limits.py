"""What to know before using a number of the study: baseline, accuracy kept, pooled differences, statistical power."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import stdev

from reporting.gathered import Study
from reporting.intervals import power
from reporting.labels import MODELS, label
from reporting.outcomes import ACCURACY, KEPT, OVERFOCUS, at
from reporting.words import written
from vitfocus.report.page import Page

#: ViT-S trained from scratch on CIFAR-100 without and with CB (CB, Table S4).
PAPER_PLAIN, PAPER_GAIN = 74.73, 0.70
#: A baseline that many points below the published one is called out.
FAR = 5.0
#: Which images the two parts of the share kept under corruption are measured on.
KEPT_IMAGES = (
    "The share kept under corruption divides the accuracy on 5,000 corrupted test images, every second one (2,500 for "
    "fine-tuned models), by the clean accuracy on all 10,000. The images are the same in every arm, but the share also "
    "depends on how hard the chosen images are for a model; on the same clean images it would be slightly different."
)


def add_limits(page: Page, study: Study) -> None:
    """The sentences, where there is anything to say."""
    said = limits(study)
    if said:
        page.section("Before you use these numbers")
        page.points(said)


def limits(study: Study) -> list[str]:
    """One sentence or two per limitation, as far as the runs are there."""
    return [*_baseline(study), *_collapse(study), *_kept(study), *_power(study), *_pooled(study)]


def _baseline(study: Study) -> Iterator[str]:
    reached = study.estimate("vit-s", "plain", ACCURACY)
    if reached is not None:
        runs = study.runs["vit-s"]["plain"].values()
        epochs = ", ".join(sorted({f"{count:g}" for run in runs if (count := at("epochs")(run)) is not None}))
        said = (
            f"Baseline: plain ViT-S reaches {written(reached, ACCURACY)} % after {epochs} epochs; the CB paper reports "
            f"{PAPER_PLAIN} % for ViT-S on CIFAR-100 (Table S4)."
        )
        far = reached.mean < PAPER_PLAIN - FAR
        yield f"{said} A gain over such a baseline does not predict the gain over a well-trained one." if far else said


def _collapse(study: Study) -> Iterator[str]:
    arms = (("vit-s", "plain"), ("vit-s", "tap-adl"), ("vit-ti", "plain"), ("vit-ti", "tap-adl"))
    found = [(group, arm, study.estimate(group, arm, OVERFOCUS)) for group, arm in arms]
    shares = [f"{MODELS[group]}, {label(arm)}: {100 * one.mean:.1f} %" for group, arm, one in found if one is not None]
    if shares:
        yield f"Share of attention that the most attended 5 % of tokens receive, mean over layers: {'; '.join(shares)}."


def _kept(study: Study) -> Iterator[str]:
    shares = []
    for group in ("vit-ti", "vit-s"):
        found = study.compare([(1, group, "tap-adl"), (-1, group, "plain")], KEPT)
        if found is not None:
            treated, plain = (KEPT.write(side.mean) for side in found.sides)
            apart = written(found.difference, KEPT, signed=True)
            shares.append(f"{MODELS[group]} {treated} % with TAP + ADL and {plain} % plain ({apart})")
    if shares:
        yield (
            f"Share of the clean accuracy kept under corruption: {'; '.join(shares)}. A corruption error that falls "
            "while this share does not rise reflects the higher clean accuracy."
        )
        yield KEPT_IMAGES


def _power(study: Study) -> Iterator[str]:
    chances = []
    for group in ("vit-ti", "vit-s"):
        found = study.against_plain(group, "cb-upper", ACCURACY)
        if found is not None and found.count > 1 and (spread := stdev(found.values)) > 0:
            chances.append(f"{100 * power(PAPER_GAIN, spread, found.count):.0f} % ({MODELS[group]})")
    if chances:
        yield (
            f"Power: if CB in the upper half truly added the {PAPER_GAIN:.2f} points of the CB paper's Table S4, these "
            f"seeds, with the spread they show, would have detected it with a probability of {', '.join(chances)}."
        )


def _pooled(study: Study) -> Iterator[str]:
    found = study.pooled_against_plain("fine-tune", ACCURACY)
    if found:
        shown = "; ".join(f"{label(arm)} {written(one, ACCURACY, signed=True)}" for arm, one in found.items())
        yield (
            f"Fine-tuned accuracy less plain's, with one residual variance for all arms (model: arm + seed): {shown}. "
            "The other intervals of fine-tuned models estimate the variance from one pair of arms and three seeds, so "
            "their widths vary a lot by chance. The pooled analysis was chosen after the runs."
        )
