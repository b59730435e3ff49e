"""From the folder of results to the page that shows them, and to the tables in the README beside it.

    python studies/cifar100/study.py report

reads the JSON files under results/, writes report.html and two pictures beside them, and replaces the generated part
of README.md.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from arms import ARMS, SEEDS
from reporting.claims import judge
from reporting.gathered import Study, gather
from reporting.pictures import write_pictures
from reporting.readme import update_readme
from reporting.sections.attention import add_attention
from reporting.sections.circumstances import add_circumstances, missing_runs
from reporting.sections.claimed import add_claims
from reporting.sections.costs import add_cost
from reporting.sections.diagnosis import add_diagnosis
from reporting.sections.finetune import add_finetune
from reporting.sections.heads import add_heads
from reporting.sections.limits import add_limits
from reporting.sections.progress import add_progress
from reporting.sections.robust import add_robustness
from reporting.sections.selection import add_selection

from vitfocus import __version__
from vitfocus.report.page import Page

REPORT = "report.html"
TITLE = "Do the papers' claims hold? A study on CIFAR-100"

PLAN = {group: list(arms) for group, arms in ARMS.items()}


def write(folder: Path) -> Path:
    """Write the page about the results in a folder into it; a README beside a folder named `results` gets its tables.

    The study may be incomplete in any way: what is there is shown, and the page says how far it went.
    """
    study = gather(folder, PLAN)
    path = build(study).write(folder / REPORT)
    pictures = write_pictures(folder, study)
    if folder.resolve().name == "results":
        update_readme(folder.resolve().parent / "README.md", study, PLAN, len(SEEDS), pictures)
    return path


def build(study: Study) -> Page:
    """The page: first what it says, then the evidence, then how it came about."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = Page(TITLE, f"Context Broadcasting, TAP and ADL, with vitfocus {__version__}; written {stamp}.")
    judged = judge(study)
    add_progress(page, study, PLAN, len(SEEDS), judged)
    add_limits(page, study)
    add_claims(page, judged)
    add_robustness(page, study)
    add_attention(page, study)
    add_heads(page, study)
    add_finetune(page, study)
    add_diagnosis(page, study)
    add_cost(page, study)
    add_selection(page, study)
    add_circumstances(page, study, missing_runs(study, PLAN, SEEDS))
    return page
