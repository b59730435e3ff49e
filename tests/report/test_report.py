"""The report: what it gathers, what it says, and that nothing in it is invented."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.train_tools import tiny

import vitfocus as vf
from vitfocus.attention.curves import uniform_references
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import Shapes, shapes_batch
from vitfocus.report import model_card
from vitfocus.report.comparison import Difference, Estimate, MetricRow, SharedTest, _contradicted_by_mce
from vitfocus.report.model_card import TreatedPlace, measure_cost, multiply_adds
from vitfocus.report.runs import collect_models
from vitfocus.report.scores import severity_chart
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.train import train

SECTIONS = [
    "Result",
    "Scores",
    "Robustness",
    "Attention by depth",
    "Cost",
    "Treatments",
    "Training",
    "Data and provenance",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real, tiny trainings, their evaluation on corruptions in a third folder, and their diagnoses."""
    folder = tmp_path_factory.mktemp("runs")
    for name, spec in (("a-treated", "vit_tiny_patch16_224+cbs(layers=[1])+adl"), ("plain", "vit_tiny_patch16_224")):
        train(tiny(f'model.spec="{spec}"'), out=folder / name)
    models = {name: vf.load(folder / name / "model") for name in ("plain", "a-treated")}
    named = {"first": models["plain"], "second": models["a-treated"]}
    vf.evaluate(named, "cifar10-c", Shapes("val", length=10, size=16), out=folder / "scores", progress=False)
    images = shapes_batch(range(4), split="val", size=16)[0]
    for name, model in models.items():
        vf.diagnose(model, images, "gaussian_noise/3").save(folder / name / "attention")
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of some of the runs, to be spoilt."""

    def copy(*names: str) -> Path:
        for name in names:
            shutil.copytree(runs / name, tmp_path / name)
        return tmp_path

    return copy


def test_comparison_has_its_sections_in_order(runs: Path, tmp_path: Path) -> None:
    written = vf.report(runs, out=tmp_path / "page.html")
    html = written.path.read_text("utf-8")
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", html) == SECTIONS
    assert written.models == ["plain", "a-treated"]  # the untreated one is what the other is compared with
    results = json.loads((runs / "scores" / "results.json").read_text())
    assert results["fingerprint"]["data"]["digest"][:12] in html
    assert results["fingerprint"]["models"]["first"]["digest"][:12] in html
    assert json.loads((runs / "plain" / "results.json").read_text())["data_sha256"]["val"][:12] in html
    for word in ("nan", "None", "undefined"):
        assert not re.search(rf"[>\s]{word}[<\s,]", html), word


def first_screen(html: str) -> str:
    """The section Result alone."""
    return html.split(">Result</h2>")[1].split("<h2")[0]


def test_the_first_screen_has_the_result_its_figures_and_next_steps(runs: Path, tmp_path: Path) -> None:
    result = first_screen(vf.report(runs, out=tmp_path / "two.html").path.read_text("utf-8"))
    leads = re.findall(r'<p class="lead">(.*?)</p>', result)
    assert len(leads) == 2 and "mean error over the corruptions" in leads[0] and "clean top-1" in leads[1]
    assert all(re.search(r"a-treated.* 95\s% interval [+−][\d.]+ to [+−][\d.]+\)", lead) for lead in leads)
    assert result.count("<svg") == 3 and "Improvement over plain" in result and "error by severity" in result
    assert "attention is nearly uniform" in result  # two hardly trained models of five tokens
    assert "engine.seed=1" in result and "<code>vitfocus train" in result


def test_means_by_severity_are_over_the_same_corruptions() -> None:
    """The noises of Cityscapes-C have severities 1 to 3 only; with them the mean would rise at 4."""
    snow = {"severities": {severity: 70.0 - severity for severity in range(1, 6)}}
    noise = {"severities": dict.fromkeys(range(1, 4), 20.0)}
    charts = []
    for cells in ({"snow": snow, "shot_noise": noise}, {"snow": snow}):
        test = SharedTest("cityscapes-c", {"a": Scores("cityscapes-c", 4, {"a": {"cells": cells}})})
        charts.append(severity_chart(test, {"a": 0}))
    assert charts[0] is not None and charts[0] == charts[1]


def test_a_single_model_is_described_and_not_compared(runs: Path, tmp_path: Path) -> None:
    html = vf.report(runs / "plain", out=tmp_path / "one.html").path.read_text("utf-8")
    assert "Robustness</h2>" not in html and "Treatments</h2>" not in html  # nothing was measured, nothing is treated
    result = first_screen(html)
    lead, *found = re.findall(r'<p class="lead">(.*?)</p>', result)
    assert len(found) <= 2 and not any("against plain" in one for one in found)  # what stands out in its attention
    assert re.match(r"plain: top-1 accuracy [\d.]+\s%, 95\s% interval [\d.]+ to [\d.]+ \(end of training", lead)
    assert "Improvement" not in result and "vitfocus evaluate MODEL" in result and "another model" in result


def test_page_is_self_contained(runs: Path, tmp_path: Path) -> None:
    written = vf.report(runs, out=tmp_path / "page.html")
    html = written.path.read_text("utf-8")
    assert written.size < 5_000_000 and written.size == written.path.stat().st_size
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=\"(?!data:)", html) and "<link" not in html
    assert html.count("<svg") == html.count('data-save="svg"') and html.count("<table") == html.count('data-save="csv"')
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_differences_are_those_of_the_images(runs: Path, tmp_path: Path) -> None:
    """Against the outcomes of single images as they were stored, without the report's own arithmetic."""
    rows = {row.measure: row for row in vf.report(runs, out=tmp_path / "p.html").rows if row.test == "cifar10-c"}
    with np.load(runs / "scores" / "samples.npz") as stored:
        hits = {
            name: np.stack(
                [stored[k] for k in stored.files if k.endswith(f"|{name}|top1") and not k.startswith("clean")]
            )
            for name in ("first", "second")
        }
        clean = {name: stored[f"clean|{name}|top1"] for name in ("first", "second")}
    assert hits["first"].shape == (75, 10)
    errors = {name: 100 * (1 - found.mean()) for name, found in hits.items()}
    row = rows["mean error over the corruptions"]
    assert row.values["plain"].number == pytest.approx(errors["first"])
    difference = row.differences["a-treated"]
    assert difference.paired and difference.number == pytest.approx(errors["second"] - errors["first"])
    paired = (hits["first"].astype(float) - hits["second"]).mean(axis=0)
    generator = np.random.default_rng(1)
    drawn = [100 * paired[generator.integers(0, 10, 10)].mean() for _ in range(4000)]
    assert difference.interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1.0)
    top1 = rows["clean top-1 accuracy"].differences["a-treated"].number
    assert top1 == pytest.approx(100 * (clean["second"].mean() - clean["first"].mean()))


def test_models_are_identified_by_their_weights(runs: Path) -> None:
    """The evaluation calls them first and second, and lies elsewhere; a diagnosis lies inside its run."""
    plain, treated = collect_models([runs / "plain", runs / "scores", runs / "a-treated"])
    assert (plain.name, treated.name) == ("plain", "a-treated")
    for model in (plain, treated):
        assert len(model.scores) == len(model.diagnoses) == 1 and model.training is not None
    assert treated.card is not None
    diversified = TreatedPlace("adl", "adl", "attention.map")
    assert [block.treated for block in treated.card.blocks] == [
        [diversified],
        [TreatedPlace("cb", "cbs(layers=[1])", "mlp.end"), diversified],
    ]


def test_treatment_without_parameters_counts_as_a_different_model(runs: Path, tmp_path: Path) -> None:
    """Context Broadcasting adds no tensor: the weights are the same, the model is not."""
    models = {"plain": vf.load(runs / "plain" / "model"), "cb": vf.treat_(vf.load(runs / "plain" / "model"), "cb")}
    vf.evaluate(models, "clean", Shapes("val", length=4, size=16), out=tmp_path / "scores", progress=False)
    models = collect_models([tmp_path / "scores", runs / "plain"])
    assert [(one.name, one.treatments, one.training is not None) for one in models] == [
        ("plain", [], True),
        ("cb", ["cb"], False),
    ]
    first, second = (one.identity for one in models)
    assert first is not None and second is not None and first.digest == second.digest


def test_two_diagnoses_of_one_name_are_two_models(copied: Callable[..., Path]) -> None:
    folder = copied("plain", "a-treated")
    models = collect_models([folder / "plain" / "attention", folder / "a-treated" / "attention"])
    assert len(models) == 2 and len({model.name for model in models}) == 2


def test_unmeasured_metrics_are_absent(runs: Path, tmp_path: Path) -> None:
    html = vf.report(runs / "plain" / "attention", out=tmp_path / "p.html").path.read_text("utf-8")
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", html) == ["Result", "Attention by depth", "Data and provenance"]
    clean = json.loads((runs / "plain" / "attention" / "diagnosis.json").read_text())
    for row in clean["rows"]:
        row.pop("stability"), row.pop("head_similarity")
    alone = tmp_path / "clean"
    alone.mkdir()
    (alone / "diagnosis.json").write_text(
        json.dumps({**clean, "against": None, "stability_values": {}, "findings": []})
    )
    html = vf.report(alone).path.read_text("utf-8")
    assert "Entropy by depth" in html and "Stability by depth" not in html and "Head similarity" not in html
    assert "clean and under" not in html


def test_different_protocols_are_shown_but_not_compared(copied: Callable[..., Path]) -> None:
    folder = copied("plain", "a-treated")
    for name, seed in (("plain", 0), ("a-treated", 1)):
        model = vf.load(folder / name / "model")
        data = Shapes("val", length=6, size=16)
        vf.evaluate({name: model}, "clean", data, seed=seed, batch_size=6, out=folder / name / "clean", progress=False)
    results = folder / "a-treated" / "clean" / "results.json"
    content = json.loads(results.read_text())
    content["fingerprint"]["data"]["digest"] = "0" * 32
    results.write_text(json.dumps(content))
    written = vf.report(folder)
    rows = [row for row in written.rows if row.test.startswith("clean")]
    assert rows and not any(row.differences for row in rows)
    assert "are not compared with each other; they differ in: data.digest" in written.path.read_text("utf-8")


def test_higher_iou_is_better_and_summaries_suffice(tmp_path: Path) -> None:
    """Segmentation under corruptions, of which only results.json was kept: numbers, and no interval is made up."""

    def summary(low: float, high: float) -> dict[str, object]:
        fog = {"miou": (low + high) / 2, "severities": {"1": high, "2": low}}
        return {"miou": 70.0, "miou_corrupted": fog["miou"], "cells": {"clean": {"miou": 70.0}, "fog": fog}}

    content = {
        "suite": "cityscapes-c",
        "images": 5,
        "models": {"one": summary(40, 60), "two": summary(30, 65)},
        "notes": [],
        "fingerprint": {"suite": "cityscapes-c", "data": {"digest": "d" * 32}, "models": {}},
    }
    (tmp_path / "results.json").write_text(json.dumps(content))
    written = vf.report(tmp_path)
    row = next(row for row in written.rows if row.measure == "mean mIoU over the corruptions")
    assert row.differences["two"].number == pytest.approx(-2.5) and row.differences["two"].interval is None
    html = written.path.read_text("utf-8")
    fills = {text: fill for fill, text in re.findall(r'fill="rgb\(([\d,]+)\)"/><text[^>]*>([+−][\d.]+)</text>', html)}
    assert fills == {"+5.0": "146,197,222", "−10.0": "179,88,6"}  # better: towards blue; worst: full orange
    assert "two is better in 1 of 2 cells" in html


def summarised(**models: dict[str, object]) -> dict[str, object]:
    """The content of a results.json without samples."""
    fingerprint = {"suite": "imagenet-c", "data": {"digest": "d" * 32}, "models": {}}
    return {"suite": "imagenet-c", "images": 50, "models": models, "notes": [], "fingerprint": fingerprint}


def test_significant_differences_are_stated(tmp_path: Path) -> None:
    """Every clear difference is said above the table, worse ones and details too; unclear ones are not judged."""
    generator = np.random.default_rng(0)
    bad, good = generator.random(400) < 0.3, generator.random(400) < 0.9
    columns = {"one": {"top1": bad, "top5": good}, "two": {"top1": good, "top5": bad}}
    models = {
        name: {"cells": {}, **{key: 100 * float(hits.mean()) for key, hits in found.items()}}
        for name, found in columns.items()
    }
    content = {**summarised(**models), "suite": "clean", "images": 400}  # type: ignore[arg-type]
    (tmp_path / "results.json").write_text(json.dumps(content))
    samples = {f"clean|{name}|{key}": hits for name, found in columns.items() for key, hits in found.items()}
    np.savez(tmp_path / "samples.npz", **samples)
    written = vf.report(tmp_path)
    judgements = {row.measure: row.judgement("two") for row in written.rows}
    assert judgements == {"top-1 accuracy": "better", "top-5 accuracy": "worse"}
    html = written.path.read_text("utf-8")
    sentences = re.findall(r"<(?:li|p[^>]*)>(.*?)</(?:li|p)>", html)
    assert any(s.startswith("two is better than one in top-1 accuracy (clean): ") for s in sentences)
    assert any(
        re.match(r"clean, other metrics: two against one is worse in top-5 accuracy \(−\d", s) for s in sentences
    )
    assert re.search(r">−[\d.]+ \[−[\d.]+, −[\d.]+\] worse<", html) and "✓" not in html
    np.savez(
        tmp_path / "samples.npz",
        **{k: bad if "|two|" in k else v for k, v in samples.items()} | {"clean|one|top1": bad, "clean|one|top5": bad},
    )
    assert {row.judgement("two") for row in vf.report(tmp_path).rows} == {""}


@pytest.mark.parametrize(("mce", "judgement"), [(80.0, ""), (60.0, "better")])
def test_lower_relative_error_is_not_a_gain_if_the_error_rose(mce: float, judgement: str) -> None:
    found = {"one": {"relative_mce": 90.0, "mce": 70.0}, "two": {"relative_mce": 85.0, "mce": mce}}
    values = {name: Estimate(summary["relative_mce"]) for name, summary in found.items()}
    row = MetricRow("imagenet-c", "relative mCE", "%", False, values, {"two": Difference(-5.0, (-6.0, -4.0), True)})
    assert replace(row, not_judged=_contradicted_by_mce(row, found)).judgement("two") == judgement


def test_scores_survive_samples_under_another_name(copied: Callable[..., Path]) -> None:
    folder = copied("scores") / "scores"
    results = folder / "results.json"
    results.write_text(results.read_text().replace('"second"', '"renamed"'))
    written = vf.report(folder)
    row = next(row for row in written.rows if row.measure == "mean error over the corruptions")
    assert set(row.values) == {"first", "renamed"}
    assert row.differences["renamed"].interval is None and not row.differences["renamed"].paired
    html = written.path.read_text("utf-8")
    assert "lacks outcomes of renamed (it has first, second)" in html
    scores = load_scores(folder)
    with pytest.raises(VitfocusError, match="The run of renamed has no outcomes of single images"):
        scores.compare("first", "renamed")


@pytest.mark.parametrize("size", [64, 112])
def test_uniform_attention_lies_on_the_dashed_line(size: int) -> None:
    """5 % of few tokens are no whole number of them: uniform attention must not seem to lie below the line."""
    model = vf.create_model("vit_tiny_patch16_224", depth=2, img_size=size, embed_dim=48, num_heads=3, num_classes=5)
    for name, weight in model.named_parameters():
        if "attn.qkv" in name:
            weight.data.zero_()
    diagnosis = vf.diagnose(model, shapes_batch(range(2), size=size)[0])
    (line,) = uniform_references({"one": diagnosis, "two": diagnosis})
    tokens = (size // 16) ** 2 + 1
    assert line.level == pytest.approx(100 * max(1, round(0.05 * tokens)) / tokens)
    assert [100 * row["overfocus"] for row in diagnosis.rows] == pytest.approx([line.level] * 2, rel=1e-4)
    assert f"({line.level:.3g} %)" in line.name


def test_models_with_other_numbers_of_tokens_have_lines_of_their_own() -> None:
    def read(*keys: int) -> Diagnosis:
        rows = [{"layer": i, "overfocus": 0.5, "entropy_bound": float(np.log(k))} for i, k in enumerate(keys)]
        return Diagnosis(model="m", images=1, size=(64, 64), against=None, rows=rows)

    one, two = uniform_references({"vit": read(65, 65), "pvt": read(49, 100)})
    assert one.name == "vit: uniform attention (4.62 %)" and one.level == pytest.approx(300 / 65)
    assert two.name == "pvt: uniform attention (4.08 to 5 %)" and two.level is None
    assert [level for _, level in two.points] == pytest.approx([200 / 49, 5.0])


def test_strings_are_escaped(copied: Callable[..., Path]) -> None:
    folder = copied("scores")
    evil = '</script><script>alert("x")</script>'
    results = folder / "scores" / "results.json"
    content = results.read_text().replace('"first"', json.dumps(evil))
    results.write_text(content)
    with np.load(folder / "scores" / "samples.npz") as stored:
        columns = {key.replace("|first|", f"|{evil}|"): stored[key] for key in stored.files}
    np.savez(folder / "scores" / "samples.npz", **columns)
    html = vf.report(folder / "scores", title="<b>bold</b>").path.read_text("utf-8")
    assert "alert(&quot;x&quot;)" in html and "<script>alert" not in html and "<b>bold" not in html


def test_interrupted_or_truncated_run_is_read(copied: Callable[..., Path]) -> None:
    folder = copied("plain") / "plain"
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "model")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    html = vf.report(folder).path.read_text("utf-8")
    assert "Training loss" in html and "Not finished: plain" in html and "Scores</h2>" not in html


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: None, "There is no folder"),
        (lambda f: f.mkdir(), "holds nothing to report on: expected results.json"),
        (lambda f: f.write_text("x"), "is a file; a run is a folder"),
        (lambda f: (f.mkdir(), (f / "protocol.json").write_text("{}")), "has no results yet"),
        (
            lambda f: (f.mkdir(), (f / "diagnosis.json").write_text('{"rows": 1}')),
            "was not written by vitfocus diagnose",
        ),
        (lambda f: (f.mkdir(), (f / "results.json").write_text("{")), "cannot be read"),
    ],
)
def test_folders_without_a_run_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.rglob("report.html"))


def test_command_prints_what_it_wrote(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "two.html"
    assert main(["report", str(runs / "plain"), str(runs / "a-treated"), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"] == ["plain", "a-treated"] and told["bytes"] == out.stat().st_size
    row = next(row for row in told["scores"] if row["measure"] == "top-1 accuracy")
    last = {name: json.loads((runs / name / "results.json").read_text())["last"]["top1"] for name in told["models"]}
    assert {name: value["number"] for name, value in row["values"].items()} == pytest.approx(
        {name: 100 * share for name, share in last.items()}
    )


def test_every_command_leaves_a_report(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(runs / "plain" / "model")
    arguments = ["--limit", "3", "--against", "fog/1", "--explore", "--out", str(tmp_path / "d")]
    assert main(["diagnose", model, *arguments]) == 0
    data = tmp_path / "data"
    for index in range(2):
        (data / str(index)).mkdir(parents=True)
        picture = shapes_batch([index], size=16)[0][0].permute(1, 2, 0).numpy()
        __import__("PIL.Image").Image.fromarray(picture).save(data / str(index) / "x.png")
    names = [f"{index}" for index in range(10)]
    for name in names[2:]:
        (data / name).mkdir()
        shutil.copy(data / "0" / "x.png", data / name / "x.png")
    assert main(["evaluate", model, "--suite", "clean", "--data", str(data), "--out", str(tmp_path / "e")]) == 0
    for folder in ("d", "e"):
        html = (tmp_path / folder / "report.html").read_text("utf-8")
        assert ">Cost</h2>" in html and ">plain<" in html  # the run's name, not the folder "model"
    assert 'id="explorer-data"' in (tmp_path / "d" / "report.html").read_text("utf-8")
    joined = collect_models([tmp_path / "d", tmp_path / "e", runs / "plain"])
    assert len(joined) == 1 and len(joined[0].diagnoses) == 2 and joined[0].scores  # one set of weights, one model


def test_failing_report_does_not_fail_the_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(model_card, "write_cards", fail)
    assert (
        main(["diagnose", str(runs / "plain" / "model"), "--limit", "2", "--out", str(tmp_path / "d"), "--json"]) == 0
    )
    told = capsys.readouterr()
    assert "The report could not be written: the disk is full" in told.err and json.loads(told.out)["rows"]
    assert (tmp_path / "d" / "diagnosis.json").is_file()


def test_costs_are_counted_and_leave_the_model_alone(capfd: pytest.CaptureFixture[str]) -> None:
    model = vf.create_model("vit_tiny_patch16_224+tap", depth=2, img_size=64, embed_dim=48, num_heads=3, num_classes=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    cost = measure_cost(model, batch=2)
    assert capfd.readouterr().err == ""  # torch's profiler has nothing to tell the user
    assert cost is not None and cost.memory_bytes > 0 and cost.device
    assert 0 < cost.forward_seconds.median <= cost.forward_seconds.range[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert modes == [module.training for module in model.modules()] and torch.equal(random, torch.get_rng_state())
    plain = vf.untreat_(model)
    n, d = 17, 48
    block = 3 * n * d * d + 2 * n * n * d + n * d * d + 8 * n * d * d
    assert multiply_adds(plain) == 16 * d * 3 * 16 * 16 + 2 * block + 5 * d


def test_a_model_without_anatomy_has_a_short_card() -> None:
    made = model_card.make_card(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)))
    assert made.parameters == 39 and not made.blocks and made.cost is None


@pytest.mark.slow
def test_the_demo_ends_with_a_table_and_the_path_of_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), "--epochs", "1", "--images", "20"]) == 0
    told = capsys.readouterr().out
    assert "clean top-1 accuracy" in told and told.rstrip().endswith(f"report: {tmp_path / 'report.html'}")
    html = (tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", html) == SECTIONS and 'id="explorer-data"' in html
    assert len(html) < 5_000_000
