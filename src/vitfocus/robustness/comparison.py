"""Two runs side by side: is the difference larger than noise? Only runs by the same protocol are compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitfocus.anatomy import insertions_sentence
from vitfocus.core.errors import VitfocusError
from vitfocus.core.statistics import mcnemar, paired_difference
from vitfocus.core.tables import Table
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.robustness.metrics import mce_shares
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.run_folder import FREE, Columns, differences


@dataclass(frozen=True)
class Comparison:
    """`rows`: condition, both numbers in percent, second minus first with its paired 95 % interval, McNemar's p.

    `differing` lists where the protocols differ, which is empty unless the comparison was forced; `insertions` has a
    sentence for each of the two whose treatments were inserted after its weights were last trained.
    """

    suite: str
    first: str
    second: str
    rows: list[dict[str, Any]]
    differing: tuple[str, ...] = ()
    insertions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "differing": list(self.differing)}

    def table(self) -> Table:
        """A table to print."""
        cells = [
            [
                row["name"],
                f"{row['first']:.2f}",
                f"{row['second']:.2f}",
                f"{row['difference']:+.2f} [{row['interval'][0]:+.2f}, {row['interval'][1]:+.2f}]",
                f"{row['p_value']:.2g}" if "p_value" in row else "–",
            ]
            for row in self.rows
        ]
        caption = (
            "Top-1 unless named otherwise; differences with paired bootstrap 95 % intervals; p by McNemar's exact test."
        )
        if self.differing:
            caption += f" Forced: the protocols differ in {'; '.join(self.differing)}."
        caption = " ".join(filter(None, (caption, insertions_sentence(self.insertions))))
        columns = ["condition", self.first, self.second, "difference", "p"]
        return Table(f"{self.suite}: {self.second} against {self.first}", columns, cells, caption)


def compare(first: Scores | str | Path, second: Scores | str | Path, force: bool = False, seed: int = 0) -> Comparison:
    """Compare two models' results, given as `Scores` or as run folders, image by image.

    Runs whose protocols differ are refused, with what differs, unless forced; they must still hold the same images.
    """
    one, two = (scores if isinstance(scores, Scores) else load_scores(scores) for scores in (first, second))
    for scores in (one, two):
        if len(scores.models) != 1:
            raise VitfocusError(
                f"A run of {len(scores.models)} models: pick one with .only(name): {', '.join(scores.models)}."
            )
    differing = differences(one.fingerprint, two.fingerprint, FREE)
    if differing and not force:
        raise VitfocusError(
            "These runs were not made by the same protocol, so their numbers do not compare (force=True, --force, does "
            f"it all the same); they differ in {'; '.join(differing)}."
        )
    names = [next(iter(scores.models)) for scores in (one, two)]
    cells = [
        {cell: columns[name] for cell, columns in s.samples.items() if name in columns}
        for s, name in zip((one, two), names, strict=True)
    ]
    for known, name in zip(cells, names, strict=True):
        if not known:
            raise VitfocusError(
                f"There are no outcomes of single images for {name}, so it cannot be compared image by image; evaluate "
                f"it anew."
            )
    shared = [cell for cell in cells[0] if cell in cells[1]]
    if not shared:
        raise VitfocusError("These runs have no condition in common, so there is nothing to compare.")
    rows = [_row(cell, cells[0][cell], cells[1][cell], seed) for cell in shared]
    if all(f"{c}/{s}" in shared for c in CORRUPTIONS for s in range(1, 6)) and "mce" in one.models[names[0]]:
        rows.append(_scored("mCE", mce_shares(cells[0]), mce_shares(cells[1]), seed))
    said = [scores.insertions.get(name) for scores, name in zip((one, two), names, strict=True)]
    if names[0] == names[1]:
        names = [f"{names[0]} (first)", f"{names[1]} (second)"]
    insertions = {name: sentence for name, sentence in zip(names, said, strict=True) if sentence}
    return Comparison(one.suite, names[0], names[1], rows, tuple(differing), insertions)


def _row(cell: str, first: Columns, second: Columns, seed: int) -> dict[str, Any]:
    if "top1" not in first:
        kind = "flip" if "flip" in first else "accuracy"
        return _scored(cell, first[kind], second[kind], seed)
    row = _scored(cell, first["top1"], second["top1"], seed)
    test = mcnemar(first["top1"], second["top1"])
    return {**row, "only_first": test.only_first, "only_second": test.only_second, "p_value": test.p_value}


def _scored(name: str, first: Any, second: Any, seed: int) -> dict[str, Any]:
    difference = paired_difference(first, second, seed)
    return {
        "name": name,
        "first": 100 * float(first.mean()),
        "second": 100 * float(second.mean()),
        "difference": 100 * difference.mean,
        "interval": [100 * difference.low, 100 * difference.high],
    }
