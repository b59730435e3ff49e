"""Numbers that README, docs and the study's own page quote are printed by a command of the repository."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

STUDY = Path(__file__).parents[2] / "studies" / "cifar100"
sys.path.insert(0, str(STUDY))

import gate  # noqa: E402
import tiers  # noqa: E402
from reporting import readme  # noqa: E402
from reporting.long import write_report  # noqa: E402


def test_every_number_quoted_about_the_study_is_printed_by_its_commands(tmp_path: Path) -> None:
    root = STUDY.parents[1]
    words, _, results = (STUDY / "README.md").read_text(encoding="utf-8").partition(readme.BEGIN)
    printed = set(re.findall(r"\d+\.\d+", results.partition(readme.END)[0] + gate.table()))
    headline = re.search(
        r"^What to expect of them.*?\n\n", (root / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert headline is not None
    page = (root / "docs" / "should-i-use-it.md").read_text(encoding="utf-8")
    registers = runpy.run_path(str(root / "studies" / "registers" / "study.py"), run_name="study")
    outcome = json.loads(registers["RESULTS"].read_text(encoding="utf-8"))
    lines = [str(registers["table"](outcome)), *registers["differences"](outcome)]
    long = write_report(tmp_path, list(tiers.planned_runs(tiers.read_plan())), tiers.finished(), [])
    lines.append(long.read_text(encoding="utf-8"))
    printed |= set(re.findall(r"\d+\.\d+", "\n".join(lines)))
    for text in (words, headline.group(), page):
        quoted = re.findall(r"\d+\.\d+", text)
        assert len(quoted) > 10 and not [number for number in quoted if number not in printed]
