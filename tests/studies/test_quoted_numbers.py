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
from reporting import readme, texts  # noqa: E402
from reporting.long import write_report  # noqa: E402


def test_every_number_quoted_about_the_study_is_printed_by_its_commands(tmp_path: Path) -> None:
    root = STUDY.parents[1]
    words, _, results = (STUDY / "README.md").read_text(encoding="utf-8").partition(readme.BEGIN)
    printed = set(re.findall(r"\d+\.\d+", results.partition(readme.END)[0] + gate.table()))
    text = (root / "README.md").read_text(encoding="utf-8")
    headline = text.partition("<!-- long study, headline")[2].partition("```")[0]
    page = (root / "docs" / "should-i-use-it.md").read_text(encoding="utf-8")
    collapse = (
        (root / "docs" / "attention-collapse.md").read_text(encoding="utf-8").partition("## The same on CIFAR-100")[2]
    )
    registers = runpy.run_path(str(root / "studies" / "registers" / "study.py"), run_name="study")
    outcome = json.loads(registers["RESULTS"].read_text(encoding="utf-8"))
    lines = [str(registers["table"](outcome)), *registers["differences"](outcome)]
    plan, found, costs = tiers.read_plan(), tiers.finished(), tiers.read_costs()
    rows = tiers.analyse(plan, found)
    runs = list(tiers.planned_runs(plan))
    long = write_report(tmp_path, runs, found, rows, costs)
    written = texts.texts(tiers.count_runs(runs, found), found, rows, costs)
    camvid = json.loads((root / "benchmarks" / "results" / "camvid-cuda.json").read_text(encoding="utf-8"))
    lines += [f"{100 * run['scores']['miou']:.2f}" for run in camvid["runs"].values()]
    lines += [long.read_text(encoding="utf-8"), *(text for name, text in written.items() if name != "situations")]
    printed |= set(re.findall(r"\d+\.\d+", "\n".join(lines)))
    assert set(re.findall(r"\d+\.\d+", written["situations"])) <= printed  # the table sums up the other texts
    for text, least in ((words, 10), (headline, 10), (page, 10), (collapse, 4)):
        quoted = re.findall(r"\d+\.\d+", text)
        assert len(quoted) > least and not [number for number in quoted if number not in printed]


def test_the_long_study_is_written_about_as_its_result_files_say(tmp_path: Path) -> None:
    """After adding a result file, run `python studies/cifar100/tiers.py report`, and commit what it changed."""
    root, plan = STUDY.parents[1], tiers.read_plan()
    runs, found, costs = list(tiers.planned_runs(plan)), tiers.finished(), tiers.read_costs()
    rows = tiers.analyse(plan, found)
    assert not [str(path) for path in texts.outdated(root, tiers.count_runs(runs, found), found, rows, costs)]
    page = write_report(tmp_path, runs, found, rows, costs)
    for path in page.parent.iterdir():
        assert path.read_text() == (tiers.RESULTS / path.name).read_text(), f"{path.name} is out of date"
    assert (root / "docs" / "images" / "collapse.svg").read_text() == (tmp_path / "collapse-attention.svg").read_text()
    for path in texts.targets(root):  # every text has a place
        marks = re.findall(r"<!-- long study, ([^:]+):", path.read_text(encoding="utf-8"))
        assert marks and path.read_text(encoding="utf-8").count(texts.END) == len(marks)
