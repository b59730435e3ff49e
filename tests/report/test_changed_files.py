"""Files that were edited by hand: each wrong value is a sentence that names file and place, never a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import build
from helpers.train_tools import tiny

import vitfocus as vf
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.cli import main
from vitfocus.data.shapes.dataset import Shapes, shapes_batch
from vitfocus.report import build_page
from vitfocus.report.explorer import explorer_data, load_explorer, write_explorer
from vitfocus.report.model_card import write_cards
from vitfocus.report.runs import collect_models, write_data_source
from vitfocus.robustness.results import compare, load_scores
from vitfocus.train import train

GONE = object()
WRONG = ["x", 3.5, -1, [], {}, None, True, ["a"], {"a": "b"}, GONE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, two evaluations and a diagnosis, with all that is written beside them."""
    folder = tmp_path_factory.mktemp("runs")
    train(tiny("epochs=0.4", "warmup_epochs=0.1"), out=folder / "run")
    model = vf.load(folder / "run" / "model")
    images = shapes_batch(range(2), split="val", size=16)[0]
    for suite, more in (("clean", {}), ("cifar10-c", {"corruptions": ["fog"], "severities": [1, 3]})):
        data = Shapes("val", length=4, size=16)
        vf.evaluate({"one": model}, suite, data, out=folder / suite, progress=False, **more)
    (folder / "run" / "attention").mkdir()
    diagnosis = vf.diagnose(model, images, "gaussian_noise/3").to_json()  # `save` would draw the figures too
    (folder / "run" / "attention" / "diagnosis.json").write_text(diagnosis)
    write_data_source(folder / "run" / "attention", "shapes", "abc")
    write_explorer(folder / "run" / "attention", explorer_data(model, images, None))
    write_cards(folder / "clean", {"one": model})
    return folder


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a json, of a list the first entry alone."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*place, key))


def spoilt(content: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    if not place:
        return wrong
    content = at = copy.deepcopy(content)
    for key in place[:-1]:
        at = at[key]
    if wrong is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = wrong
    return content


def read_all(file: Path, runs: Path) -> None:
    """All that a report, a comparison and a diagnosis do with what they read of a file, except writing it."""
    models = collect_models([runs], make_cards=False)
    build_page(models)[0].html()
    load_explorer(models)
    if file.name == "results.json" and file.parent.name != "run":
        scores = load_scores(file.parent)
        str(scores.table())
        compare(scores.only(next(iter(scores.models))), file.parent).table()
    if file.name == "diagnosis.json":
        diagnosis = Diagnosis.load(file.parent)
        diagnosis.compare(diagnosis).table()


@pytest.mark.parametrize(
    "name",
    [
        *("clean/results.json", "cifar10-c/results.json", "clean/card.json", "run/results.json"),
        *("run/attention/diagnosis.json", "run/attention/data.json", "run/attention/explorer.json"),
    ],
)
def test_invalid_values_never_cause_a_traceback(runs: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder, ignore=shutil.ignore_patterns("checkpoints", "model", "best", "*.png", "*.html"))
    file = folder / name
    content = json.loads(file.read_text())
    said = 0
    for number, place in enumerate(places(content)):
        for wrong in (WRONG[number % len(WRONG)], WRONG[(3 * number + 1) % len(WRONG)], GONE):
            if wrong is GONE and (not place or isinstance(place[-1], int)):
                continue
            file.write_text(json.dumps(spoilt(content, place, wrong)))
            try:
                read_all(file, folder)
            except vf.VitfocusError as error:
                said += 1
                # Without its model's name, an evaluation is told from another that it cannot be compared with.
                assert str(file) in str(error) or "compare" in str(error), (place, wrong, error)
                assert "\n" not in str(error)
    assert said > number // 2


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("run/config.toml", lambda text: "model = 3\n", "model is 3; expected a table"),
        ("run/config.toml", lambda text: "model = \n", "config.toml is not valid TOML"),
        ("run/metrics.jsonl", lambda text: text.replace('"epoch": ', '"epoch": "x", "e": '), "[0].epoch"),
        (
            "run/metrics.jsonl",
            lambda text: text.replace('"step": 1', '"step": "1"'),
            "[0].step is '1'; expected",
        ),
        ("clean/results.json", lambda text: text.replace('"suite":', '"suit":'), "It lacks the key 'suite'"),
    ],
)
def test_the_command_says_which_file_is_wrong(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: Callable[[str], str], said: str
) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder, ignore=shutil.ignore_patterns("checkpoints", "model", "best"))
    (folder / name).write_text(change((folder / name).read_text()))
    assert main(["report", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vitfocus: {folder / name}") and said in told and told.count("\n") == 1


def test_a_run_with_a_damaged_recipe_or_results_is_not_resumed(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    recipe, results = tiny("epochs=0.4", "warmup_epochs=0.1"), (folder / "results.json").read_text()
    (folder / "results.json").write_text(results.replace('"steps": ', '"steps": "many", "s": '))
    with pytest.raises(vf.VitfocusError, match=r"results\.json .*steps is 'many'; expected a whole number"):
        train(recipe, folder, resume="auto")
    (folder / "results.json").write_text(results)
    shutil.rmtree(folder / "checkpoints")
    (folder / "config.toml").write_text("[")
    with pytest.raises(vf.VitfocusError, match=r"config\.toml is not valid TOML"):
        train(recipe, folder, resume="auto")


def test_saved_model_with_a_damaged_task_is_refused(tmp_path: Path) -> None:
    file = vf.save(build("vit")[0], tmp_path) / "config.json"
    config = json.loads(file.read_text())
    for wrong in ({"task": 3}, {"classes": "cat"}, {"size": "large"}, []):
        file.write_text(json.dumps({**config, "task": wrong}))
        with pytest.raises(vf.VitfocusError, match=r"config\.json was not written by vitfocus\.save.*: task"):
            vf.load(tmp_path)
