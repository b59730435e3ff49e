"""Figures that stand alone as SVG files, for a README: charts side by side, light or dark as the reader's screen is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from reporting.charts import difference_chart
from reporting.gathered import Study
from reporting.outcomes import ACCURACY, CORRUPTION
from reporting.sections.diagnosis import entropy_chart, family_chart
from reporting.sections.robust import SCRATCH
from vitfocus.core.files import write_text
from vitfocus.report.page import static

#: File and what it shows.
DIFFERENCES = (
    "differences.svg",
    "Accuracy and corruption error of each arm less the plain model's, with 95 % intervals",
)
DIAGNOSIS = (
    "diagnosis.svg",
    "DeiT-Ti on photographs: entropy of attention and its stability under corruptions, by depth",
)
_GAP = 24.0
_PER_ROW = 3


def write_pictures(folder: Path, study: Study) -> list[tuple[str, str]]:
    """Write those that the results allow; gives (file name, what it shows)."""
    groups = [group for group in SCRATCH if study.arms(group)]
    scores = [difference_chart(study, one, groups) for one in (ACCURACY, CORRUPTION)] if groups else []
    depth = [figure[1] for figure in (*entropy_chart(study.diagnosis), *family_chart(study.diagnosis))]
    written = []
    for (name, title), charts in ((DIFFERENCES, scores), (DIAGNOSIS, depth)):
        drawn = [chart for chart in charts if chart]
        if drawn:
            write_text(folder / name, beside(drawn, title))
            written.append((name, title))
    return written


def beside(charts: Sequence[str], title: str) -> str:
    """Charts of a page, three per row, as one SVG file that needs no page: colours and fonts are written into it."""
    x, y, wide, tall, parts = 0.0, 0.0, 0.0, 0.0, []
    for number, chart in enumerate(charts):
        if number and number % _PER_ROW == 0:
            x, y = 0.0, tall + _GAP
        width, height = (float(number) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', chart)[0])
        inner = chart[chart.index(">") + 1 : chart.rindex("</svg>")]
        parts.append(f'<g transform="translate({x:g} {y:g})">{inner}</g>')
        wide, tall, x = max(wide, x + width), max(tall, y + height), x + width + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall:g}" width="{wide:g}" height="{tall:g}" '
        f'role="img" class="chart"><title>{escape(title)}</title><style>{_style()}</style>'
        f'<rect width="{wide:g}" height="{tall:g}" style="fill:var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _style() -> str:
    """The page's colours and the rules of its charts."""
    sheet = static("page.css")
    light, dark = (re.findall(start + r" \{([^}]*)\}", sheet)[0] for start in (r"^:root", r'\[data-theme="dark"\]'))
    rules = "".join(re.findall(r"svg\.chart \.[^{}]+\{[^{}]*\}", sheet))
    return (
        f"svg.chart{{{light}font:12px system-ui,sans-serif}}"
        f"@media (prefers-color-scheme:dark){{svg.chart{{{dark}}}}}{rules}"
    )
