"""All attacks: `python -m adversarial --seed 0 --tries 20000`, with tests on the path; some: `--only specs calls`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from adversarial import files, folders, runs, words
from adversarial.harness import Tally

ATTACKS = {
    "specs": words.specs,
    "command lines": words.command_lines,
    "overrides": words.overrides,
    "calls": words.calls,
    "JSON and TOML": files.records,
    "archives": files.archives,
    "images": files.images,
    "shards": files.shards,
    "hostile folders": folders.folders,
    "flipped bits": runs.flips,
    "kills in checkpoints": runs.checkpoint_kills,
    "kills in evaluations": runs.evaluation_kills,
    "kills in training": runs.training_kills,
    "concurrent runs": runs.concurrent,
    "two processes": runs.processes,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[*ATTACKS])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        tally = Tally(args.seed)
        for name in args.only:
            folder = Path(place, name.replace(" ", "-"))
            folder.mkdir()
            ATTACKS[name](tally, args.tries, folder)
            print(name, tally.tried[name], len(tally.failed[name]), f"{tally.seconds[name]:.0f} s", file=sys.stderr)
        os.chdir("/")
    print(tally.table())
    for name, failures in tally.failed.items():
        kinds = Counter(
            re.sub(r"^.*?: (?=\w*(Error|Exception|message|end))", "", one, flags=re.S)[:120] for one in failures
        )
        for kind, count in kinds.most_common(60):
            example = next(one for one in failures if kind in one)
            print(f"{count:5} {name}: {example[:400]}")
