"""How far the study went, and what it says in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reporting.claims import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Judged
from reporting.gathered import Study
from reporting.labels import MODELS, label
from reporting.outcomes import ACCURACY, CORRUPTION, at, walk
from reporting.words import INTERVALS, written
from vitfocus.core.tables import counted
from vitfocus.report.page import Page

#: Groups and their arms as planned, and how many seeds each arm is to have.
Plan = Mapping[str, Sequence[str]]

#: Values of data.source for CIFAR-100 ("cifar-mosaic" in older results), and the number of its test images.
SOURCES, TEST_IMAGES = frozenset({"cifar100", "arrays", "cifar-mosaic"}), 10_000


def add_progress(page: Page, study: Study, plan: Plan, seeds: int, judged: Sequence[Judged]) -> None:
    """Runs finished of those planned by group, the claims counted, and the headline numbers."""
    page.section("In short")
    page.points([*cautions(study), how_far(study, plan, seeds), verdicts(judged), *headlines(study)])
    page.text(
        f"{INTERVALS} The best of many means is flattered by chance: differences decide, further down.", quiet=True
    )
    page.table("how far it went", ["group", "finished", "planned", "seeds by arm", "epochs"], rows(study, plan, seeds))


def cautions(study: Study) -> list[str]:
    """What must be known before any number is read: other data than CIFAR-100, or part of the test images."""
    sources = {str(name) for run in study.all_runs() if (name := walk(run, ("recipe", "data", "source")))}
    others = sorted(sources - SOURCES)
    images = [count for run in study.all_runs() if (count := at("protocol", "test_images")(run)) is not None]
    said = [f"These runs are no study of CIFAR-100: their data are {', '.join(others)}."] if others else []
    if images and min(images) < TEST_IMAGES:
        said.append(f"Models were measured on {min(images):,.0f} test images only, of {TEST_IMAGES:,}.")
    return said


def finished(study: Study, plan: Plan, group: str, seeds: int) -> tuple[int, int]:
    """Runs that are finished and planned in a group; a run outside the plan counts as both."""
    arms = study.runs.get(group, {})
    done = sum(len(found) for found in arms.values())
    extra = sum(max(0, len(found) - (seeds if arm in plan.get(group, ()) else 0)) for arm, found in arms.items())
    return done, len(plan.get(group, ())) * seeds + extra


def how_far(study: Study, plan: Plan, seeds: int) -> str:
    """One sentence."""
    counts = {group: finished(study, plan, group, seeds) for group in groups(study, plan)}
    done, planned = (sum(count[i] for count in counts.values()) for i in (0, 1))
    said = "; ".join(f"{MODELS.get(group, group)} {n} of {m}" for group, (n, m) in counts.items())
    begin = "All" if done == planned else f"{done} of"
    return f"{begin} {counted(planned, 'planned run')} are finished ({said})."


def groups(study: Study, plan: Plan) -> list[str]:
    """Planned groups first."""
    return list(dict.fromkeys([*plan, *study.runs]))


def verdicts(judged: Sequence[Judged]) -> str:
    """One sentence: how many comparisons speak for the papers' claims, against them, or not clearly."""
    count = {name: sum(one.verdict == name for one in judged) for name in (SUPPORTED, NOT_SUPPORTED, UNDECIDED)}
    absent = sum(one.found is None for one in judged)
    unrun = f", {absent} of them for want of runs" if absent else ""
    return (
        f"The papers' claims at this scale, in {len(judged)} comparisons: {count[SUPPORTED]} supported, "
        f"{count[NOT_SUPPORTED]} not supported, {count[UNDECIDED]} undecided{unrun}."
    )


def headlines(study: Study) -> list[str]:
    """For each model from scratch: plain, the most accurate arm, and the one that errs least under corruptions."""
    said = []
    for group in ("vit-ti", "vit-s"):
        accuracy = {arm: one for arm in study.arms(group) if (one := study.estimate(group, arm, ACCURACY))}
        errors = {arm: one for arm in study.arms(group) if (one := study.estimate(group, arm, CORRUPTION))}
        if "plain" not in accuracy or "plain" not in errors:
            continue
        top = max(accuracy, key=lambda arm: accuracy[arm].mean)
        firm = min(errors, key=lambda arm: errors[arm].mean)
        said.append(
            f"{MODELS[group]}: plain reaches {written(accuracy['plain'], ACCURACY)} % and errs in "
            f"{written(errors['plain'], CORRUPTION)} % of corrupted images; the highest mean accuracy is that of "
            f"{label(top)} ({written(accuracy[top], ACCURACY)} %), the lowest mean corruption error that of "
            f"{label(firm)} ({written(errors[firm], CORRUPTION)} %)."
        )
    return said


def rows(study: Study, plan: Plan, seeds: int) -> list[list[Any]]:
    """A line a group."""
    lines: list[list[Any]] = []
    for group in groups(study, plan):
        done, planned = finished(study, plan, group, seeds)
        arms = dict.fromkeys([*plan.get(group, ()), *study.arms(group)])
        by_arm = [len(study.runs.get(group, {}).get(arm, {})) for arm in arms]
        spread = str(min(by_arm)) if min(by_arm) == max(by_arm) else f"{min(by_arm)} to {max(by_arm)}"
        epochs = sorted({f"{count:g}" for run in study.all_runs(group) if (count := at("epochs")(run)) is not None})
        lines.append([MODELS.get(group, group), done, planned, spread, ", ".join(epochs) or None])
    return lines
