"""Running items: trained, resumed, measured with given weights, drawn, calibrated; and mistakes on the command line."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.dataset import open_images
from vitfocus.reproduce import load_item
from vitfocus.reproduce.figures import FIGURES
from vitfocus.reproduce.items import MEASURES
from vitfocus.reproduce.plan import DIAGNOSED, DataFolders, plan_row, validation_batches
from vitfocus.reproduce.results import Measurement, _from_diagnosis, softmax_surface
from vitfocus.reproduce.run import reproduce
from vitfocus.train.recipe import load_recipe
from vitfocus.train.run import train
from vitfocus.treatments.save_load import create_model

TINY = ["epochs=0.05", "warmup_epochs=0", "train_length=40", "val_length=12", "batch=20"]


def test_an_override_must_be_for_some_row(tmp_path: Path) -> None:
    """ADL's warm-up is for some rows of a table and does nothing to its others; a power is for none."""
    reproduce("tap/table2", out=tmp_path, overrides=["adl_warmup_epochs=1"], rows=[7, 8], count_only=True)
    with pytest.raises(VitfocusError, match=r"not in model\.spec"):
        reproduce("tap/table2", out=tmp_path, overrides=["adl_warmup_epochs=1"], rows=[7], count_only=True)
    with pytest.raises(VitfocusError, match=r"schedule\.decay=polynomial"):
        reproduce("tap/table2", out=tmp_path, overrides=["schedule.power=2"], count_only=True)


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
    assert (run.prerequisites[0].folder / "model" / "model.safetensors").is_file()
    losses = list(map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()))
    assert any("distill" in key for row in losses for key in row), losses[0]


def test_tasks_other_than_classification_run(tmp_path: Path) -> None:
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
def test_invalid_input_is_reported_in_one_sentence(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error


def test_additions_of_a_row_are_counted_even_if_its_baseline_is_not_selected(tmp_path: Path) -> None:
    whole = reproduce("cb/table3a", out=tmp_path, count_only=True)[0]
    alone = reproduce("cb/table3a", out=tmp_path, count_only=True, rows=[3])[0]
    assert [row.row.label for row in alone.rows] == ["+ CB"] and not alone.missing
    assert alone.rows[0].values == whole.rows[2].values and alone.rows[0].values["flops_added"].number > 0


def test_an_item_that_only_counts_needs_no_data(tmp_path: Path) -> None:
    outcome = reproduce("cb/table3a", "imagenet", out=tmp_path)[0]
    assert all(row.where == "imagenet: counted only, 224 px" for row in outcome.rows)
    assert not list(tmp_path.rglob("model"))


def test_a_recipe_says_which_run_it_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["data.source=shapes", "data.root=", "size=32", "val_length=4", "train_length=8", "batch=4", "device=cpu"]
    with pytest.raises(VitfocusError, match=r"no runs/deit_s_cb/model to start from: train it first \(vitfocus train"):
        train("ade20k_upernet_s_cb", overrides=[*small, "steps=1", "warmup_steps=0", "data.workers=0"])


def test_rows_are_measured_with_given_weights(tmp_path: Path) -> None:
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

    monkeypatch.setattr("vitfocus.reproduce.plan.create_model", build)
    given = {"data": [f"imagenet={tmp_path / 'imagenet'}"], "out": tmp_path / "out", "images": 1, "pretrained": True}
    outcome = reproduce("cb/figure7a", "imagenet", **given)[0]
    assert set(asked) == {("deit_small_patch16_224", True)}
    assert outcome.rows[0].values["entropy_class"].images == 1 and not outcome.rows[1].values
    assert any("+ CB was neither trained nor measured" in note for note in outcome.missing)


def test_diagnoses_read_the_requested_number_of_images(tmp_path: Path) -> None:
    item = load_item("cb/figure7b")
    run = plan_row(item, item.rows[0], "smoke", DataFolders(), tmp_path, ["val_length=200"])
    assert run is not None
    assert sum(map(len, validation_batches(run, 130))) == 130, "more than the scale's usual number"
    assert sum(map(len, validation_batches(run, None))) == 200 and DIAGNOSED["imagenet"] is None


def test_figures_of_single_heads_and_of_night_scenes(tmp_path: Path) -> None:
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
