"""All attacks: `python -m adversarial --seed 0 --tries 20000`, with tests on the path; some: `--only specs calls`.

`--out FILE` keeps the table; categories that are not run again keep their rows.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from adversarial.attacks import ATTACKS, share
from adversarial.harness import Tally

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=20_000, help="of all categories together")
    parser.add_argument("--only", nargs="*", default=[*ATTACKS], choices=[*ATTACKS])
    parser.add_argument("--out", type=Path, help="Markdown file with the table")
    args = parser.parse_args()
    out = args.out and args.out.absolute()
    tally = Tally(args.seed)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for name in args.only:
            folder = Path(place, name.replace(" ", "-"))
            folder.mkdir()
            began = time.monotonic()
            ATTACKS[name](tally, share(name, args.tries), folder)
            took = f"{time.monotonic() - began:.0f} s"
            print(name, tally.tried[name], len(tally.failed[name]), took, file=sys.stderr)
            for problem in tally.failed[name][:20]:
                print(f"  {problem[:600]}", file=sys.stderr)
            if out:
                tally.keep(out)
        os.chdir("/")
    print(tally.table())
    for name, failures in tally.failed.items():
        kinds = Counter(
            re.sub(r"^.*?: (?=\w*(Error|Exception|message|end))", "", one, flags=re.S)[:120] for one in failures
        )
        for kind, count in kinds.most_common(60):
            example = next(one for one in failures if kind in one)
            print(f"{count:5} {name}: {example[:400]}")
    sys.exit(any(tally.failed.values()))
