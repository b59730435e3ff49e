"""Every table and figure of the papers: it resolves, its models can be built, and they count as the papers say."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.recipes import Recipe, value_of
from vitfocus.reproduce import SCALES, Item, TableRow, item_names, items, load_item
from vitfocus.reproduce.figures import FIGURES
from vitfocus.reproduce.items import MEASURES, model_setups, protocol_facts
from vitfocus.reproduce.plan import DataFolders, PlannedRun, plan_row
from vitfocus.reproduce.results import Measurement, count, count_model
from vitfocus.reproduce.run import counted_on, suite_options
from vitfocus.train.recipe import difference, load_recipe, refuse_unused_keys, shipped_recipes
from vitfocus.treatments.cost import count_cost
from vitfocus.treatments.save_load import create_model

LISTED = [
    *(f"cb/figure{n}" for n in ("3", "4", "5", "7a", "7b", "8", "9", "10", "S1")),
    *(f"cb/table{n}" for n in (*range(1, 12), "4a", "4b", *(f"S{n}" for n in range(1, 7)))),
    *(f"tap/figure{n}" for n in (1, 3, 4, 5, 6, 7)),
    *(f"tap/table{n}" for n in range(1, 8)),
]


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
                count = count_model("parameters", run)
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


def test_rows_depend_on_runs_trained_before_them(tmp_path: Path) -> None:
    item = load_item("cb/tableS1")
    student = plan(item, item.rows[0], "smoke", tmp_path)
    teacher = plan(load_item("cb/table5"), load_item("cb/table5").rows[6], "smoke", tmp_path)
    assert student and teacher and [run.folder for run in student.prerequisites] == [teacher.folder]
    assert student.recipe and student.recipe.distill.teacher == str(teacher.folder / "model")
    item = load_item("cb/table7")
    detector = plan(item, item.rows[1], "imagenet", tmp_path)
    backbone = plan(load_item("cb/table2"), load_item("cb/table2").rows[2], "imagenet", tmp_path)
    assert detector and backbone and detector.prerequisites[0].folder == backbone.folder
    assert detector.recipe and detector.recipe.model.weights == str(backbone.folder / "model")


def test_items_are_listed_without_torch() -> None:
    """Which a job of a cluster imports too, before it starts its command."""
    code = "import sys, vitfocus.reproduce.jobs, vitfocus.cli.reproduce; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_invalid_toml_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
    every = {run.digest: run for first in planned for run in (first, *first.prerequisites)}
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
        starts = {run.recipe.model.weights and run.prerequisites[0].digest for run in same if run.recipe}
        expected = {""}
        if recipe.model.weights:  # such as "runs/deit_ti_cb/model": the run of that recipe
            start = load_recipe(Path(recipe.model.weights).parts[1])
            expected = {run.digest for run in of_spec[start.model.spec] if not experiment_differences(start, run)}
        assert starts <= expected, f"{name} starts from {recipe.model.weights}, and its rows from {starts}"


def experiment_differences(recipe: Recipe, run: PlannedRun) -> list[str]:
    assert run.recipe is not None
    elsewhere = ("data.root", "model.weights", "distill.teacher")
    return [line for line in difference(recipe, run.recipe) if not line.startswith(elsewhere)]
