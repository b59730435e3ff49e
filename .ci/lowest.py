"""Compare what is installed with the lowest versions that pyproject.toml allows, and print both as a table.

Exits with 1 if another version of a dependency is installed than the lowest: a bound that cannot be installed beside
the others is not a bound.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
declared = {
    name: lowest
    for line in [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    for name, _, lowest in [re.sub(r"\[.*?\]", "", line).partition(">=")]
    if name != project["name"]
}
wrong = []
print("| dependency | lowest | installed |\n|---|---|---|")
for name, lowest in sorted(declared.items()):
    try:
        installed = version(name)
    except PackageNotFoundError:
        installed = "-"
    print(f"| {name} | {lowest} | {installed} |")
    if re.match(rf"{re.escape(lowest)}(\.0)*(\+.*)?$", installed) is None:
        wrong.append(name)
if wrong:
    sys.exit(f"Not the lowest version: {', '.join(wrong)}. Raise the bound to what was installed.")
