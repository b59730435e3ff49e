"""Every table and figure of the papers: it resolves, its models can be built, and they count as the papers say."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import CORRUPTIONS
from vitfocus.data.classification.dataset import open_images
from vitfocus.recipes import Recipe, value_of
from vitfocus.reproduce import SCALES, Item, TableRow, item_names, items, load_item
from vitfocus.reproduce.figures import FIGURES
from vitfocus.reproduce.items import MEASURES, model_setups, protocol_facts
from vitfocus.reproduce.results import Measurement, _from_diagnosis, count, count_parameters_of, softmax_surface
from vitfocus.reproduce.run import counted_on, reproduce, suite_options
from vitfocus.reproduce.runs import DIAGNOSED, DataFolders, PlannedRun, plan_row, validation_batches
from vitfocus.train.recipe import difference, load_recipe, refuse_unused_keys, shipped_recipes
from vitfocus.train.run import train
from vitfocus.treatments.cost import count_cost
from vitfocus.treatments.save_load import create_model

LISTED = [
    *(f"cb/figure{n}" for n in ("3", "4", "5", "7a", "7b", "8", "9", "10", "S1")),
    *(f"cb/table{n}" for n in (*range(1, 12), "4a", "4b", *(f"S{n}" for n in range(1, 7)))),
    *(f"tap/figure{n}" for n in (1, 3, 4, 5, 6, 7)),
    *(f"tap/table{n}" for n in range(1, 8)),
]
TINY = ["epochs=0.05", "warmup_epochs=0", "train_length=40", "val_length=12", "batch=20"]


def rows(kind: str = "model") -> list[tuple[Item, TableRow]]:
    return [(item, row) for item in map(load_item, item_names()) for row in item.rows if getattr(row, kind)]


def plan(item: Item, row: TableRow, scale: str, tmp: Path) -> PlannedRun | None:
    return plan_row(item, row, scale, DataFolders(tmp), tmp / "out")


def test_every_item_of_both_papers_is_there_and_complete() -> None:
    assert set(LISTED) <= set(item_names())
    for item in map(load_item, item_names()):
        assert item.title
        if item.parts:
            assert all(part in item_names() for part in item.parts) and not item.rows
            continue
        assert item.rows and item.data and item.measures
        labels = [row.label for row in item.rows]
        assert len(set(labels)) == len(labels), f"{item.name} has two rows of one name"
        assert set(item.measures) <= set(MEASURES) and set(item.figures) <= set(FIGURES)
        assert item.figures or "figure" not in item.name, f"{item.name} draws nothing"
        stated = {name for row in item.rows for name in row.paper}
        assert stated <= set(item.measures), f"{item.name} quotes what it does not measure: {stated}"
        assert stated or any("no numbers" in note or "neither its numbers" in note for note in item.notes)


def test_every_item_says_what_is_exact_assumed_and_different(capsys: pytest.CaptureFixture[str]) -> None:
    items = [item for item in map(load_item, item_names()) if not item.parts]
    assert all(item.protocol["exact"] for item in items)
    for fact in protocol_facts():
        assert any(fact.holds_for(item) for item in items), f"no item has {fact}"
        assert bool(fact.option) == bool(fact.tried)
        if fact.option:  # each value to try is one that the suite takes
            suite_options([f"{fact.option}={value}" for value in fact.tried])
    assumed = {item.name: " ".join(item.protocol["assumed"]) for item in items}
    expected = {
        "cb/table8": ("FGSM's ε is 1/255", "Zero means black", "Λ starts at 0"),
        "cb/table9": ("255 photons",),
        "tap/figure5": ("severity 3",),
        "cb/table11": ("counted through all stages",),
    }
    for name, texts in expected.items():
        assert all(text in assumed[name] for text in texts)
    assert main(["reproduce", "tap/table4", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "cb/table8" not in listed and "16 corruptions" in listed
    assert listed.index("exactly the paper's") < listed.index("assumed") < listed.index("ACDC's val")
    assert main(["reproduce", "--list", "--json"]) == 0
    found = {one["item"]: one["protocol"] for one in json.loads(capsys.readouterr().out)["items"]}
    assert found["cb/table8"] == load_item("cb/table8").protocol


def test_the_documentation_shows_the_measured_assumptions() -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("assumed_values", root / "benchmarks" / "assumed_values.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table(json.loads(script.OUT.read_text())) in (root / "docs" / "reproducing.md").read_text()


def test_every_row_resolves_at_every_scale_it_has(tmp_path: Path) -> None:
    for item, row in rows():
        for scale in SCALES:
            if scale not in model_setups()[row.model]:
                continue
            run = plan(item, row, scale, tmp_path)
            assert run is not None
            if run.recipe is not None:
                refuse_unused_keys(run.recipe)
                assert run.recipe.model.spec == run.spec
                assert scale != "smoke" or run.recipe.data.source == "shapes"
        trained = any(stand.recipe for stand in model_setups()[row.model].values())
        assert not trained or {"smoke", "imagenet"} <= set(model_setups()[row.model])


def within(ours: float, printed: Any) -> bool:
    """Whether a count is the printed one, rounded or cut to the digits it is printed with."""
    decimals = len(str(printed).partition(".")[2])
    return abs(ours - float(printed)) < 10.0**-decimals


def test_models_are_built_and_count_as_the_papers_state(tmp_path: Path) -> None:
    """Exceptions stand in the TOML with their reason; they must be real, and small."""
    checked = {"parameters": 0, "flops": 0, "flops_added": 0}
    for item, row in rows():
        run = plan(item, row, "imagenet", tmp_path)
        assert run is not None
        plain = item.baseline(row)
        before = plan(item, plain, "imagenet", tmp_path) if plain is not None else None
        for name, printed in row.paper.items():
            if MEASURES[name].source != "counted" or isinstance(printed, str):
                continue
            value = count(name, *counted_on(item, row, run, before, DataFolders(tmp_path)))
            assert isinstance(value, Measurement)
            met = within(value.number, printed)
            where = f"{item.name}, {row.label}: {name} is {value.number:.4f}, and the paper states {printed}"
            if name in row.unmet:
                assert not met, f"{where}: it is met, so the exception can go"
                assert math.isclose(value.number, float(printed), rel_tol=0.02), where  # type: ignore[arg-type]
            else:
                assert met, where
            checked[name] += 1
    assert checked["parameters"] > 50 and checked["flops"] > 45 and checked["flops_added"] == 18


def test_small_models_are_built_at_smoke_and_cifar_scale(tmp_path: Path) -> None:
    built = set()
    for item, row in rows():
        for scale in ("smoke", "cifar100"):
            run = plan(item, row, scale, tmp_path) if scale in model_setups()[row.model] else None
            if run is None or run.digest in built or run.recipe is None or run.recipe.task == "answer":
                continue
            built.add(run.digest)
            if scale == "smoke" or not row.treat:
                count = count_parameters_of(run)
                assert 1e4 < count < (2e6 if scale == "smoke" and row.model != "mixer-s16" else 2e8)
    assert len(built) > 100


def test_flops_agree_with_arithmetic() -> None:
    """A ViT's multiply-adds by hand: N·d²·(4 + 2·4) + 2·N²·d a block, the patches, and the classifier."""
    width, depth, side, patch, classes = 48, 3, 32, 4, 7
    model = create_model(
        "vit_tiny_patch16_224", img_size=side, patch_size=patch, embed_dim=width, depth=depth, num_classes=classes
    )
    patches = (side // patch) ** 2
    tokens = patches + 1
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    expected = depth * block + patches * 3 * patch**2 * width + width * classes
    assert count_cost(model, side).flops == expected
    assert model.training and next(model.parameters()).device.type == "cpu"
    hybrid = create_model(
        "vit_tiny_patch16_224+cb(variant=hybrid,site=both)", img_size=side, patch_size=patch, embed_dim=width, depth=1
    )
    plain = create_model("vit_tiny_patch16_224", img_size=side, patch_size=patch, embed_dim=width, depth=1)
    assert count_cost(hybrid, side).flops - count_cost(plain, side).flops == 2 * 4 * tokens * width


def test_one_row_in_two_tables_is_one_run(tmp_path: Path) -> None:
    first, second = load_item("cb/table5"), load_item("cb/table8")
    plain = [plan(item, item.rows[index], "smoke", tmp_path) for item, index in ((first, 3), (second, 0))]
    assert plain[0] and plain[1] and plain[0].folder == plain[1].folder
    treated = plan(first, first.rows[4], "smoke", tmp_path)
    assert treated and treated.folder != plain[0].folder
    changed = plan_row(first, first.rows[3], "smoke", DataFolders(), tmp_path / "out", ["epochs=1"])
    assert changed and changed.folder != plain[0].folder
    logged = plan_row(first, first.rows[3], "smoke", DataFolders(), tmp_path / "out", ["log_every=7"])
    assert logged and logged.folder == plain[0].folder, "how often a run logs does not make it another"


def test_an_override_must_be_for_some_row(tmp_path: Path) -> None:
    """ADL's warm-up is for some rows of a table and does nothing to its others; a power is for none."""
    reproduce("tap/table2", out=tmp_path, overrides=["adl_warmup_epochs=1"], rows=[7, 8], count_only=True)
    with pytest.raises(VitfocusError, match=r"not in model\.spec"):
        reproduce("tap/table2", out=tmp_path, overrides=["adl_warmup_epochs=1"], rows=[7], count_only=True)
    with pytest.raises(VitfocusError, match=r"schedule\.decay=polynomial"):
        reproduce("tap/table2", out=tmp_path, overrides=["schedule.power=2"], count_only=True)


def test_rows_stand_on_what_is_trained_before_them(tmp_path: Path) -> None:
    item = load_item("cb/tableS1")
    student = plan(item, item.rows[0], "smoke", tmp_path)
    teacher = plan(load_item("cb/table5"), load_item("cb/table5").rows[6], "smoke", tmp_path)
    assert student and teacher and [run.folder for run in student.before] == [teacher.folder]
    assert student.recipe and student.recipe.distill.teacher == str(teacher.folder / "model")
    item = load_item("cb/table7")
    detector = plan(item, item.rows[1], "imagenet", tmp_path)
    backbone = plan(load_item("cb/table2"), load_item("cb/table2").rows[2], "imagenet", tmp_path)
    assert detector and backbone and detector.before[0].folder == backbone.folder
    assert detector.recipe and detector.recipe.model.weights == str(backbone.folder / "model")


def test_a_table_is_run_resumed_and_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "cb/table8", *TINY, "--images", "4", "--rows", "1,3", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in found["rows"]] == ["ViT-S", "+ CB"]
    for row in found["rows"]:
        assert row["scale"] == "smoke" and row["data"].startswith("smoke: Shapes, 32 px, 40 + 12 images")
        assert 0 <= row["measures"]["fgsm"]["ours"] <= 100 and row["measures"]["imagenet_a"]["ours"] is None
        saved = json.loads((Path(row["run"]) / "model" / "config.json").read_text())
        assert saved["spec"].endswith("cb(layers=upper)") == (row["label"] == "+ CB")
    assert found["rows"][1]["measures"]["fgsm"]["paper"] == 32.3
    assert found["rows"][1]["measures"]["fgsm"]["images"] == 4
    assert any("at most 4 images" in note for note in found["notes"])
    assert any("ImageNet-A has no counterpart" in note for note in found["notes"])

    # A killed run goes on, and what is finished is neither trained nor measured again.
    runs = [Path(row["run"]) for row in found["rows"]]
    stamps = {run: (run / "model" / "model.safetensors").stat().st_mtime_ns for run in runs}
    evaluations = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("evaluations/*/results.json")}
    assert len(evaluations) == 4
    shutil.rmtree(runs[1] / "model")
    (runs[1] / "results.json").unlink()
    again = reproduce("cb/table8", out=tmp_path, overrides=TINY, images=4, rows=[1, 3])[0]
    assert (runs[0] / "model" / "model.safetensors").stat().st_mtime_ns == stamps[runs[0]]
    assert (runs[1] / "model" / "model.safetensors").is_file()
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in evaluations.items())
    before = [row["measures"]["occlusion"]["ours"] for row in found["rows"]]
    assert [row.values["occlusion"].number for row in again.rows] == before
    lines = [line for line in again.text().splitlines() if "smoke: Shapes" in line]
    measured = [line for line in lines if line.endswith("measured on 4 images")]
    assert len(measured) == 4 and all("FGSM" in line or "occluded" in line for line in measured)

    # Another item with the same rows trains nothing, draws, and names the scale in every line.
    curves = reproduce("cb/figureS1", out=tmp_path, overrides=TINY, images=4)[0]
    assert [row.run.folder for row in curves.rows if row.run] == runs
    assert [path.name for path in curves.figures] == ["curves.svg"] and curves.figures[0].stat().st_size > 1000
    lines = [line for line in curves.text().splitlines() if "loss" in line and "paper" not in line.lower()]
    assert len(lines) == 4 and all("smoke: Shapes" in line for line in lines)


def test_diagnosed_figures_are_drawn(tmp_path: Path) -> None:
    outcome = reproduce("tap/figure1", out=tmp_path, overrides=TINY, images=2, rows=[2])[0]
    assert {path.name for path in outcome.figures} == {"maps.png", "stability.svg"}, outcome.missing
    assert 0 < outcome.rows[0].values["stability"].number <= 1.001
    assert (
        json.loads((tmp_path / "smoke" / "items" / "tap-figure1" / "outcome.json").read_text())["item"] == "tap/figure1"
    )


def test_a_distilled_row_trains_its_teacher_first(tmp_path: Path) -> None:
    outcome = reproduce("cb/tableS1", out=tmp_path, overrides=TINY, images=2, rows=[1])[0]
    run = outcome.rows[0].run
    assert run is not None and 0 <= outcome.rows[0].values["top1"].number <= 100
    assert (run.before[0].folder / "model" / "model.safetensors").is_file()
    losses = list(map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()))
    assert any("distill" in key for row in losses for key in row), losses[0]


def test_tasks_run_too(tmp_path: Path) -> None:
    """A segmenter measured under noise; a detector's and an answerer's runs are their own tests' business."""
    short = ["schedule.epochs=0.05", "warmup_epochs=0", "train_length=20", "val_length=6", "batch=10"]
    outcome = reproduce("cb/table9", out=tmp_path, overrides=short, images=2, rows=[2])[0]
    values = outcome.rows[0].values
    assert set(values) == set(outcome.item.measures), outcome.missing
    assert values["noise_shot"].interval is not None and values["noise_blur1"].interval is None
    assert "40.22 ± 0.15" not in outcome.text() and "41.09 ± 0.09" in outcome.text()


def test_the_softmax_surface_is_the_closed_form(tmp_path: Path) -> None:
    axis, output, steepness = softmax_surface(points=21)
    assert torch.allclose(output, torch.sigmoid(axis[:, None] - axis[None, :]))
    assert torch.allclose(steepness, 2 * output * (1 - output))
    outcome = reproduce("cb/figure5", out=tmp_path)[0]
    assert outcome.rows[0].values["steepest_at"].number == 0
    assert outcome.figures[0].read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cb/table4c"], "did you mean 'cb/table4"),
        (["cb/table5", "--scale", "imagnet"], "did you mean 'imagenet'"),
        (["cb/table5", "--scale", "imagenet"], "--data imagenet=DIR"),
        (["cb/table6", "--scale", "cifar100"], "use --scale smoke or --scale imagenet"),
        (["cb/table5", "--scale", "imagenet", "--data", "/nowhere"], "There is no folder /nowhere"),
        (["cb/table5", "--scale", "imagenet", "--data", "imagnet-c=/tmp"], "did you mean 'imagenet-c'"),
        (["cb/table5", "--data", "/tmp"], "reads no --data"),
        (["cb/table5", "--count", "--images", "4"], "has no effect with --count"),
        (["cb/table5", "--rows", "10"], "has rows 1 to 9"),
        (["cb/table5", "--rows", "1,b"], "is not a list of numbers such as 1,3"),
        (["cb/table5", "epoch=1"], "epochs"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error


def test_items_are_listed_without_torch() -> None:
    """Which a job of a cluster imports too, before it starts its command."""
    code = "import sys, vitfocus.reproduce.jobs, vitfocus.cli.reproduce; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert items.CORRUPTIONS == CORRUPTIONS


def test_the_list_and_the_count_need_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in LISTED) and "imagenet" in listed
    words = ["reproduce", "cb/table4", "--scale", "imagenet", "--count", "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert [part["item"] for part in parts] == ["cb/table4a", "cb/table4b"]
    assert all(math.isclose(row["measures"]["flops"]["ours"], 4.6, rel_tol=0.01) for row in parts[0]["rows"])
    for part in parts:
        assert all(row["data"] == "imagenet: counted only, 224 px" and row["run"] is None for row in part["rows"])
        assert any("--count leaves out" in note for note in part["notes"])
    assert not (tmp_path / "out").exists()


def test_what_a_row_adds_is_counted_without_its_baseline_being_picked(tmp_path: Path) -> None:
    whole = reproduce("cb/table3a", out=tmp_path, count_only=True)[0]
    alone = reproduce("cb/table3a", out=tmp_path, count_only=True, rows=[3])[0]
    assert [row.row.label for row in alone.rows] == ["+ CB"] and not alone.missing
    assert alone.rows[0].values == whole.rows[2].values and alone.rows[0].values["flops_added"].number > 0


def test_an_item_that_only_counts_needs_no_data(tmp_path: Path) -> None:
    outcome = reproduce("cb/table3a", "imagenet", out=tmp_path)[0]
    assert all(row.where == "imagenet: counted only, 224 px" for row in outcome.rows)
    assert not list(tmp_path.rglob("model"))


def test_a_wrong_toml_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = items._read_toml("recipes/cb/table4a.toml")
    tree["rows"][1]["modle"] = "vit-s"
    monkeypatch.setattr(items, "_read_toml", lambda _: tree)
    load_item.cache_clear()
    with pytest.raises(VitfocusError, match=r"table4a\.toml .*\[rows\[1\]\] has no key 'modle': did you mean 'model'"):
        load_item("cb/table4a")
    load_item.cache_clear()


#: What the papers state about training, read from their text, by the models and treatments of rows at ImageNet scale.
STATED: list[tuple[str, str, dict[str, Any]]] = [
    (
        r"vit-(ti|s|b|s-shallow|ti-distilled|s-distilled|b-distilled)$|mixer-s16|pit-b",
        "",
        {
            "schedule.epochs": 300,
            "optimiser.name": "adamw",
            "optimiser.betas": (0.9, 0.999),
            "optimiser.weight_decay": 0.05,
            "schedule.decay": "cosine",
            "optimiser.lr": 1e-3,
            "optimiser.lr_batch": 1024,
            "data.size": 224,
        },
    ),
    (r"vit-(ti|s)(-distilled)?$", r"^cb", {"data.repeats": 1}),
    (r"vit-(ti|s|b)(-distilled)?$|mixer-s16", r"^$", {"data.repeats": 3, "schedule.warmup_epochs": 5}),
    (r"vit-b(-distilled)?$", r"^cb", {"schedule.warmup_epochs": 10, "model.drop_path": 0.2, "data.repeats": 3}),
    (r"(pvt-s|pvtv2|swin-ti)$", "", {"schedule.epochs": 120}),
    (r"localvit-ti", "", {"schedule.epochs": 150}),
    (
        r"(fan-b-hybrid|rvt-b)$",
        "",
        {
            "schedule.epochs": 300,
            "data.batch": 2048,
            "optimiser.lr": 2e-3,
            "optimiser.lr_batch": 2048,
        },
    ),
    (r"^rvt-b", "", {"augment.patchwise": 16, "engine.ema": 0.99996, "engine.precision": "fp32"}),
    (r"^fan-b", "", {"engine.ema": 0.99992, "model.drop_path": 0.35, "data.repeats": 1}),
    (
        r"upernet-.*",
        "",
        {
            "data.batch": 16,
            "optimiser.lr": 6e-5,
            "optimiser.weight_decay": 0.01,
            "optimiser.betas": (0.9, 0.999),
            "schedule.decay": "polynomial",
        },
    ),
    (r"upernet-.*-40k", "", {"schedule.steps": 40_000}),
    (r"upernet-.*-160k", "", {"schedule.steps": 160_000}),
    (r"segformer-", "", {"schedule.steps": 160_000, "data.size": 1024, "optimiser.lr": 6e-5, "segment.stride": 768}),
    (
        r"maskrcnn-",
        "",
        {
            "schedule.epochs": 12,
            "optimiser.lr": 1e-4,
            "optimiser.lr_batch": 16,
            "optimiser.weight_decay": 0.05,
        },
    ),
    (r"vilt", "", {"schedule.epochs": 10, "data.train_split": "train2014+val2014", "data.batch": 256}),
]


def test_rows_are_trained_as_the_papers_state(tmp_path: Path) -> None:
    """The facts that --list calls exact, against the recipe of every row."""
    seen = set()
    for item, row in rows():
        run = plan(item, row, "imagenet", tmp_path)
        if run is None or run.recipe is None:
            continue
        for number, (models, treats, stated) in enumerate(STATED):
            if re.match(models, row.model) and re.search(treats, row.treat):
                found = {key: value_of(run.recipe, key) for key in stated}
                assert found == stated, f"{item.name}, {row.label}"
                seen.add(number)
    assert len(seen) == len(STATED)


#: Recipes that belong to no table or figure.
OURS = {"camvid", "fashion-mnist", "finetune", "shapes"}


def test_recipes_and_items_are_the_same_experiment(tmp_path: Path) -> None:
    """Each recipe of the papers is what `reproduce` trains for some row, apart from where data and weights lie."""
    planned = [run for item, row in rows() if (run := plan(item, row, "imagenet", tmp_path)) and run.recipe]
    every = {run.digest: run for first in planned for run in (first, *first.before)}
    of_spec: dict[str, list[PlannedRun]] = {}
    for run in every.values():
        of_spec.setdefault(run.spec, []).append(run)
    for name in shipped_recipes():
        if any(name.split("_")[0].startswith(ours) for ours in OURS):
            continue
        recipe = load_recipe(name)
        apart = {run.digest: experiment_differences(recipe, run) for run in of_spec.get(recipe.model.spec, [])}
        same = [every[digest] for digest, differences in apart.items() if not differences]
        assert same, f"{name} is not the run of any row: {apart or f'no row has {recipe.model.spec}'}"
        starts = {run.recipe.model.weights and run.before[0].digest for run in same if run.recipe}
        expected = {""}
        if recipe.model.weights:  # such as "runs/deit_ti_cb/model": the run of that recipe
            start = load_recipe(Path(recipe.model.weights).parts[1])
            expected = {run.digest for run in of_spec[start.model.spec] if not experiment_differences(start, run)}
        assert starts <= expected, f"{name} starts from {recipe.model.weights}, and its rows from {starts}"


def experiment_differences(recipe: Recipe, run: PlannedRun) -> list[str]:
    assert run.recipe is not None
    elsewhere = ("data.root", "model.weights", "distill.teacher")
    return [line for line in difference(recipe, run.recipe) if not line.startswith(elsewhere)]


def test_a_recipe_says_which_run_it_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["data.source=shapes", "data.root=", "size=32", "val_length=4", "train_length=8", "batch=4", "device=cpu"]
    with pytest.raises(VitfocusError, match=r"no runs/deit_s_cb/model to start from: train it first \(vitfocus train"):
        train("ade20k_upernet_s_cb", overrides=[*small, "steps=1", "warmup_steps=0", "data.workers=0"])


def test_rows_are_measured_with_weights_that_people_have(tmp_path: Path) -> None:
    """A file with its arguments beside the weights, and a folder: nothing is trained, and the numbers are the same."""
    trained = reproduce("cb/table8", out=tmp_path / "a", overrides=TINY, images=4, rows=[1, 3])[0]
    plain, treated = (row.run for row in trained.rows)
    assert plain and treated
    state = vf.load(plain.folder / "model").state_dict()
    torch.save({"model": state, "args": argparse.Namespace(lr=1.0)}, tmp_path / "plain.pth")
    weights = [f"1={tmp_path / 'plain.pth'}", f"+ CB={treated.folder}"]
    found = reproduce("cb/table8", out=tmp_path / "b", overrides=TINY, images=4, rows=[1, 3], weights=weights)[0]
    assert not list((tmp_path / "b").rglob("metrics.jsonl")) and not list((tmp_path / "b").rglob("checkpoints"))
    for ours, theirs in zip(found.rows, trained.rows, strict=True):
        assert ours.values["fgsm"] == theirs.values["fgsm"] and ours.values["occlusion"] == theirs.values["occlusion"]
        assert "not trained here, weights" in ours.where
    curves = reproduce("cb/figureS1", out=tmp_path / "b", overrides=TINY, images=12, rows=[1], weights=weights[:1])[0]
    assert "needs a training run" in curves.text() and "train_loss" not in curves.rows[0].values
    assert curves.rows[0].values["top1"].images == 12
    with pytest.raises(VitfocusError, match=r"plain\.pth is not the model of '\+ CB_S': it has no .*context_scale"):
        reproduce("cb/table8", out=tmp_path / "b", overrides=TINY, rows=[2], weights=[f"2={tmp_path / 'plain.pth'}"])
    with pytest.raises(VitfocusError, match=r"is not the model of 'ViT-S': cb was in no block"):
        reproduce("cb/table8", out=tmp_path / "b", overrides=TINY, rows=[1], weights=[f"1={treated.folder}"])


def test_unstated_values_are_calibrated_with_given_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate is measured on the same images; options are what the table measures, and no longer assumed."""
    given = ["reproduce", "cb/table8", *TINY, "--images", "12", "--out", str(tmp_path)]
    assert main([*given, "--rows", "1", "--option", "fgsm.eps=2", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert not any("FGSM's ε" in note for note in whole["notes"]) and any("black" in note for note in whole["notes"])
    weights = ["--weights", f"1={whole['rows'][0]['run']}", "--calibrate"]
    assert main([*given, *weights, "--option", "fgsm.eps=0,2", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)
    assert [(one["option"], one["value"]) for one in trials] == [
        *(("occlusion.fill", fill) for fill in ("black", "mean")),
        *(("fgsm.eps", eps) for eps in (0, 2)),
    ]
    clean = vf.evaluate(vf.load(Path(whole["rows"][0]["run"]) / "model"), "clean", shapes_of(12), progress=False)
    assert trials[2]["ours"]["number"] == pytest.approx(clean["top1"]), "an epsilon of 0 attacks nothing"
    assert trials[3]["ours"]["number"] == whole["rows"][0]["measures"]["fgsm"]["ours"]
    assert trials[3]["off"] == pytest.approx(trials[3]["ours"]["number"] - 27.2)
    assert main([*given, *weights]) == 0
    assert "is closest" in capsys.readouterr().out
    assert main([*given, "--calibrate"]) == 2 and "give --weights ROW=FILE" in capsys.readouterr().err


def shapes_of(count: int) -> torch.utils.data.TensorDataset:
    images = open_images(load_recipe("shapes_quick", [f"val_length={count}"]).data, "val")
    return torch.utils.data.TensorDataset(images.pixels, images.labels)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cb/table5", "--calibrate"], "no value to calibrate"),
        (["cb/table8", "--calibrate", "--count"], "--calibrate"),
        (["cb/table8", "--option", "fgsm.eps=1,2"], "the table shows one"),
        (["tap/figure5", "--option", "diagnosis.severity=6"], "from 1 to 5"),
        (["cb/table8", "--option", "diagnosis.severity=2"], "does not measure that suite"),
        (["cb/table8", "--weights", "9=x.pth"], "--weights 9=x.pth"),
        (["cb/table8", "--weights", "1=/nowhere.pth"], "There are no weights /nowhere.pth"),
        (["cb/table8", "--pretrained"], "use --scale imagenet"),
        (["cb/table8", "--option", "fgsm.epsilon=2"], "did you mean 'eps'"),
        (["cb/table8", "--option", "acdc.split=test"], "does not measure that suite"),
        (["cb/table8", "--option", "fgsm.eps=two"], "fgsm.eps=two"),
        (["cb/table8", "--slurm", "gpus_per_node=8"], "is for --submit"),
        (["cb/table8", "--submit", "local", "--slurm", "gpus"], "is not KEY=VALUE"),
    ],
)
def test_mistakes_about_weights_options_and_jobs(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
    assert expected in capsys.readouterr().err


def test_pretrained_rows_train_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's weights where it has some; the other rows say why they are missing."""
    (tmp_path / "imagenet" / "val" / "n01440764").mkdir(parents=True)
    Image.new("RGB", (300, 260), "red").save(tmp_path / "imagenet" / "val" / "n01440764" / "a.JPEG")
    asked = []

    def build(spec: str, pretrained: bool, **arguments: Any) -> Any:
        asked.append((spec, pretrained))
        return create_model(spec, False, **arguments)

    monkeypatch.setattr("vitfocus.reproduce.runs.create_model", build)
    given = {"data": [f"imagenet={tmp_path / 'imagenet'}"], "out": tmp_path / "out", "images": 1, "pretrained": True}
    outcome = reproduce("cb/figure7a", "imagenet", **given)[0]
    assert set(asked) == {("deit_small_patch16_224", True)}
    assert outcome.rows[0].values["entropy_class"].images == 1 and not outcome.rows[1].values
    assert any("+ CB was neither trained nor measured" in note for note in outcome.missing)


def test_diagnoses_read_as_many_images_as_asked(tmp_path: Path) -> None:
    item = load_item("cb/figure7b")
    run = plan_row(item, item.rows[0], "smoke", DataFolders(), tmp_path, ["val_length=200"])
    assert run is not None
    assert sum(map(len, validation_batches(run, 130))) == 130, "more than the scale's usual number"
    assert sum(map(len, validation_batches(run, None))) == 200 and DIAGNOSED["imagenet"] is None


def test_figures_show_single_heads_and_the_night(tmp_path: Path) -> None:
    """CB's Figure 10: one panel per head and model; TAP's Figure 6: a scene at night where ACDC is given."""
    short = ["schedule.epochs=0.05", "warmup_epochs=0", "train_length=20", "val_length=6", "batch=10"]
    outcome = reproduce("cb/figure10", out=tmp_path, overrides=short, images=2)[0]
    assert [path.name for path in outcome.figures] == ["head_overlays.png"], outcome.missing
    figure = FIGURES["head_overlays"](outcome, None)
    assert [axes.get_title() for axes in figure.axes] == [
        title for label in ("ViT-S", "+ CB") for title in (label, *(f"head {head}" for head in range(4)))
    ]
    (tmp_path / "acdc/rgb_anon/night/val/a").mkdir(parents=True)
    (tmp_path / "acdc/gt/night/val/a").mkdir(parents=True)
    Image.new("RGB", (80, 60), "navy").save(tmp_path / "acdc/rgb_anon/night/val/a/f_rgb_anon.png")
    Image.new("L", (80, 60)).save(tmp_path / "acdc/gt/night/val/a/f_gt_labelTrainIds.png")
    outcome.folders = DataFolders(named={"acdc": tmp_path / "acdc"})
    figure = FIGURES["predictions"](outcome, None)
    rows = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    assert rows == ["clean", "snow", "clean", "snow", "night"]


def test_both_readings_of_the_distance_are_one_curve(tmp_path: Path) -> None:
    """The formula as written, an expectation over pairs, by a double loop: the sum over keys divided by N - 1."""
    model = vf.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=3)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    found = vf.diagnose(model, images)
    pairs = []
    for layer, maps in enumerate(vf.attention_maps(model, images, layers=[0, 1])):
        attention = maps.mean(1)[:, 1:, 1:]  # of the 16 patches to each other, heads averaged
        places = [(row / 3, column / 3) for row in range(4) for column in range(4)]
        total = 0.0
        for i, (row, column) in enumerate(places):
            for j, (other_row, other_column) in enumerate(places):
                if i != j:
                    total += float(attention[:, i, j].mean()) * (abs(row - other_row) + abs(column - other_column))
        pairs.append(total / (16 * 15))
        assert found.rows[layer]["distance"] == pytest.approx(15 * pairs[-1], rel=1e-4)
    value = _from_diagnosis(MEASURES["distance_pairs"], found)
    assert isinstance(value, Measurement) and value.number == pytest.approx(sum(pairs) / 2, rel=1e-4)
