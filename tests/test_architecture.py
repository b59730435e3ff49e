"""The structure of the project: which package imports which, what `import vitfocus` loads, how long files are."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vitfocus"

#: A package may import packages of a lower rank. ARCHITECTURE.md explains the order.
RANK = {
    "cli": 10,
    "reproduce": 9,
    "report": 8,
    "train": 7,
    "robustness": 7,
    "tasks": 6,
    "treatments": 5,
    "attention": 4,
    "anatomy": 3,
    "kernels": 2,
    "corruptions": 2,
    "data": 1,
    "models": 1,
    "recipes": 0,
    "core": -1,
}


def imports(path: Path) -> list[str]:
    """The packages of vitfocus that a file imports, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for inner in ast.walk(node):
                inner.skip = True  # type: ignore[attr-defined]
    found = []
    for node in ast.walk(tree):
        if getattr(node, "skip", False):
            continue
        if isinstance(node, ast.ImportFrom):
            package = path.relative_to(SOURCE.parent).with_suffix("").parts[: -node.level] if node.level else ()
            names = [".".join((*package, *filter(None, [node.module])))]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [name.split(".")[1] for name in names if name.startswith("vitfocus.")]
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        assert package in RANK, f"{package} is a new package: give it a rank here and a line in ARCHITECTURE.md"
        for other in imports(path):
            if other != package and RANK[other] >= RANK[package]:
                wrong.append(f"{path.relative_to(SOURCE)} imports vitfocus.{other}")
    assert not wrong, "\n".join(wrong)


def import_graph() -> dict[str, set[str]]:
    """The modules that each module imports, in functions and for type checkers included.

    `from package import name` is an import of the module `package.name` if there is one, and of the package if the name
    is re-exported. That importing a module runs the `__init__` of its packages first is not counted.
    """
    paths = {path.relative_to(SOURCE.parent).with_suffix("").parts: path for path in SOURCE.rglob("*.py")}
    modules = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = path.relative_to(SOURCE.parent).with_suffix("").parts[: -node.level] if node.level else ()
                outer = ".".join((*package, *filter(None, [node.module])))
                inner = [f"{outer}.{alias.name}" for alias in node.names]
                found += [one if one in modules else outer for one in inner]
        graph[name] = {one for one in found if one in modules and one != name}
    return graph


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    assert len(graph) > 100 and "vitfocus.core.errors" in graph["vitfocus.treatments.base"]
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"These modules import each other in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize(
    "statement",
    [
        "import vitfocus",
        # The package vitfocus.anatomy does not hide the function of the same name.
        "import vitfocus.anatomy.registry, importlib, vitfocus as vf; assert callable(vf.anatomy); "
        "assert importlib.import_module('vitfocus.anatomy').anatomy is vf.anatomy; "
        "vf.treat_; vf.diagnose; vf.create_model; vf.ContextBroadcasting",
    ],
)
def test_importing_is_lean(statement: str) -> None:
    """No transformers, no plotting library, and no CUDA context."""
    check = (
        f"import sys; {statement}\n"
        "heavy = {'transformers', 'matplotlib', 'accelerate', 'onnx', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_help_needs_no_torch() -> None:
    check = (
        "import sys; from vitfocus.cli import main; assert main(['--help']) == 0; assert main([]) == 0\n"
        "assert not {'torch', 'numpy', 'rich'} & {*sys.modules}\n"
    )
    shown = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout
    assert "vitfocus COMMAND --help" in shown


MOST_FILES = 198


def test_files_stay_readable() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert len(lengths) <= MOST_FILES, f"{len(lengths)} files: merge small ones that serve one idea"
    assert max(lengths.values()) <= 500, max(lengths, key=lambda path: lengths[path])
    assert sorted(lengths.values())[len(lengths) // 2] <= 215
    for path in lengths:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} does not say what it is for"


def traced(call: Callable[[], object]) -> set[tuple[str, str]]:
    """File and name of every function of vitfocus that a call runs, but comprehensions, which Python 3.12 inlines."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        inlined = code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
        if event == "call" and code.co_filename.startswith(str(SOURCE)) and not inlined:
            called.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return called


def test_few_files_and_functions_are_run(tmp_path: Path) -> None:
    """A diagnosis and one condition of ImageNet-C; imports and what is built once are done before."""
    import timm
    import torch
    from PIL import Image

    import vitfocus as vf

    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    images = torch.randn(2, 3, 64, 64)
    for folder in ("n01440764", "n01443537"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (80, 90), "teal").save(tmp_path / folder / "0.jpg")

    def evaluate() -> object:
        return vf.evaluate(model, "imagenet-c", tmp_path, corruptions=["gaussian_noise"], severities=[1], workers=0)

    for call, most_files, most_functions in ((lambda: vf.diagnose(model, images), 20, 120), (evaluate, 22, 220)):
        call()
        called = traced(call)
        files = sorted({file for file, _ in called})
        assert 10 < len(files) <= most_files, files
        assert len(called) <= most_functions, sorted(called)
