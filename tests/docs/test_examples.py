"""Every example and the notebook run as they stand, in a folder of their own, and say what they promise."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

#: What a reader is told to see in each.
SAID = {
    "compare_under_corruption": "treated against plain",
    "diagnose_your_model": "of the tokens receive",
    "evaluate_a_suite": "results.json",
    "look_at_maps": "rollout:",
    "own_family": "Anatomy of MyViT (my vit), 3 blocks",
    "save_load_push": "only treatments:",
    "segment_with_a_treated_backbone": "Segmenter: 8 images of 48x48",
    "show_a_report": "plain and cb: runs/examples/report/report.html",
    "train_a_recipe": "top-1 after 0.05",
    "treat_and_finetune": "without its treatments: (32, 10)",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert SAID[script.stem] in capsys.readouterr().out
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    assert all(path.relative_to(tmp_path).parts[0] == "runs" for path in tmp_path.rglob("*"))


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbformat")
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient")
    pytest.importorskip("ipykernel", reason="the notebook needs ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert NOTEBOOKS
    for file in NOTEBOOKS:
        notebook = nbformat.read(file, as_version=4)
        nbformat.validate(notebook)
        shown = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
        for expected in ("image/png", "<iframe sandbox", "<Diagnosis of ", "<Scores on ", "<DiagnosisComparison of "):
            assert expected in shown, f"{file.name} is committed without outputs: there is no {expected}"
        assert not re.search(r"/(work|tmp|home|root)/|Traceback|Warning", shown)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = []
        nbclient.NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
        outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not any(output.output_type == "error" for output in outputs)
        html = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
        for expected in ("stability</th>", "treated against plain", "plain → treated", "<iframe sandbox"):
            assert expected in html
