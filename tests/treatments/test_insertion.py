"""Trained weights are safe: they are told from fresh ones, and what is inserted into them is said and remembered."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import tiny, train_tools
from safetensors.torch import save_file
from torch import nn

import vitfocus as vf
from vitfocus.anatomy import build_example, families
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusWarning
from vitfocus.core.modules import inserted, is_trained
from vitfocus.data.shapes.dataset import Shapes
from vitfocus.tasks.base import start_from
from vitfocus.train import train
from vitfocus.treatments.spec import parse_treatments

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "depth": 2,
    "embed_dim": 48,
    "num_heads": 3,
    "num_classes": 10,
}

#: What is inserted, and the form that keeps the function; None where there is none.
FORMS = {
    "cb": "cbs",
    "cb(variant=gate,layers=upper)": "cbs(layers=upper)",
    "cb(variant=hybrid)": "cbs",
    "cb(site=both,position=mid)": "cbs(site=both,position=mid)",
    "cbs": "cbs",
    "tap": "tap(init=near_identity)",
    "tap(mode=kernel,branches=3)": "tap(mode=kernel,branches=3,init=near_identity)",
    "tap(mode=conv3)": "tap(mode=conv3,init=near_identity)",
    "tap(mode=average3,layers=deep)": "tap(layers=deep,init=near_identity)",
    "tap(branches=1)": "tap(branches=1)",
    "adl": "adl",
    "se": None,
    "extra": None,
    "extra(kind=mlp)": None,
    "uniform": None,
    "uniform(mode=replace_matched)": None,
    "uniform(mode=append)": None,
}


def trained_model(seed: int = 0) -> nn.Module:
    """A small ViT whose weights have left their initial values."""
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    tiny.shake(model)
    return model


def fresh_model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL)


def said(treat: Any) -> list[str]:
    """The warnings of vitfocus that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        treat()
    return [str(one.message) for one in caught if issubclass(one.category, VitfocusWarning)]


def take_a_step(model: nn.Module) -> None:
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.train()(torch.randn(2, 3, 32, 32)).square().mean().backward()
    optimiser.step()
    model.eval()


@pytest.mark.parametrize("name", tiny.TIMM)
def test_a_fresh_model_of_every_family_is_told_from_a_trained_one(name: str) -> None:
    architecture, options, _ = tiny.TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, num_classes=5, **options)
    assert not is_trained(model)
    assert not is_trained(model.half())
    tiny.shake(model.float())
    assert is_trained(model)
    assert is_trained(model.bfloat16())
    assert not is_trained(model.to("meta"))


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "swin_v2_t", "maxvit_t"])
def test_a_fresh_model_of_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.get_model(name, weights=None)
    assert not is_trained(model)
    nn.init.normal_(next(m for m in model.modules() if isinstance(m, nn.LayerNorm)).bias, std=0.01)
    assert is_trained(model)


@pytest.mark.parametrize("family", [f for f in families() if f.library == "transformers"], ids=lambda f: f.name)
def test_a_fresh_model_of_transformers(family: Any) -> None:
    if (described := build_example(family)) is None:
        pytest.skip("transformers is not installed")
    torch.manual_seed(0)
    model = type(described)(described.config)
    assert not is_trained(model)
    tiny.shake(model)
    assert is_trained(model)


def test_each_kind_of_evidence_counts_by_itself() -> None:
    def moved(module: nn.Module, name: str) -> nn.Module:
        with torch.no_grad():
            getattr(module, name)[0] += 0.9
        return module

    for module in (nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm2d(8), timm.layers.LayerScale(8), nn.Linear(64, 8)):
        assert not is_trained(module)
    assert is_trained(moved(nn.LayerNorm(8), "bias"))
    assert is_trained(moved(nn.RMSNorm(8), "weight"))
    assert is_trained(moved(nn.BatchNorm2d(8), "running_mean"))
    assert is_trained(moved(nn.BatchNorm2d(8), "running_var"))
    assert is_trained(moved(timm.layers.LayerScale(8), "gamma"))
    assert is_trained(moved(nn.Linear(64, 8), "bias"))


def test_one_step_of_training_is_enough() -> None:
    model = fresh_model()
    take_a_step(model)
    assert is_trained(model)


@pytest.mark.parametrize(("spec", "better"), FORMS.items())
def test_what_a_treatment_says_of_itself_is_what_it_does(spec: str, better: str | None) -> None:
    (treatment,) = parse_treatments(spec)
    form = treatment.preserving()
    assert (None if form is None else str(form)) == better
    model, image = trained_model(), torch.randn(2, 3, 32, 32)
    before = model(image).detach()
    sentences = said(lambda: vf.treat_(model, treatment))
    change = float((model(image).detach() - before).abs().max() / before.abs().max())
    assert treatment.preserves_function == (change < 1e-3) == (not sentences), change
    if form is not None:
        treated = vf.treat_(trained_model(), form)
        torch.testing.assert_close(treated(image), before, rtol=1e-3, atol=1e-3)


def test_one_sentence_names_the_better_spec() -> None:
    def sentence(*specs: str) -> str:
        (found,) = said(lambda: vf.treat_(trained_model(), *specs))
        return found

    assert sentence("cb") == (
        "cb changes what these trained weights compute: use cbs, which starts as the identity, or train further."
    )
    assert sentence("cb(layers=upper)+tap", "adl") == (
        "cb(layers=upper)+tap change what these trained weights compute: "
        "use cbs(layers=upper)+tap(init=near_identity), which starts as the identity, or train further."
    )
    assert sentence("se") == (
        "se changes what these trained weights compute and no form of se starts as the identity: "
        "train on before you use the model."
    )
    assert "(no form of extra does)" in sentence("tap", "extra")


def test_the_warning_points_at_the_callers_line() -> None:
    with pytest.warns(VitfocusWarning) as caught:
        vf.treat_(trained_model(), "cb")
    assert caught[0].filename == __file__


def test_fresh_models_and_preserving_forms_are_silent() -> None:
    assert not said(lambda: vf.treat_(fresh_model(), "cb+tap+se"))
    assert not said(lambda: vf.treat_(trained_model(), "cbs(layers=upper)+tap(init=near_identity)+adl"))
    assert not said(lambda: vf.create_model("vit_tiny_patch16_224+cb+tap", **SMALL))


def test_the_first_example_keeps_a_trained_models_accuracy(request: pytest.FixtureRequest) -> None:
    pages = [(Path(__file__).parents[2] / page).read_text("utf-8") for page in ("README.md", "docs/index.md")]
    (spec,), (same,) = (re.findall(r'vf\.treat_\(model, "(.+?)"\)', page) for page in pages)
    assert spec == same
    assert all(treatment.preserves_function for treatment in parse_treatments(spec))
    data = request.getfixturevalue("shared") / "data"
    models = {name: timm.create_model("deit_tiny_patch16_224") for name in ("plain", "treated")}
    for model in models.values():
        vf.load_weights(model, data / "deit_tiny_patch16_224.safetensors")
    assert not said(lambda: vf.treat_(models["treated"], spec))
    scores = vf.evaluate(models, "clean", data / "imagenet1k-sample", limit=50, progress=False)
    assert scores["plain"]["top1"] == scores["treated"]["top1"] > 60


def test_weights_that_lack_a_treatment_are_warned_of_and_those_that_hold_it_are_not(tmp_path: Path) -> None:
    plain = trained_model().state_dict()
    for spec, better in (("tap", "tap(init=near_identity)"), ("cb", "cbs")):
        treated = vf.create_model(f"vit_tiny_patch16_224+{spec}", **SMALL)
        (sentence,) = said(lambda treated=treated: vf.load_weights(treated, plain))
        assert f"use {better}," in sentence
        assert inserted(treated) == (spec,)

    model = vf.create_model("vit_tiny_patch16_224+cb+tap", **SMALL)
    take_a_step(model)
    again = vf.create_model("vit_tiny_patch16_224+cb+tap", **SMALL)
    assert not said(lambda: vf.load_weights(again, model.state_dict()))
    assert inserted(again) == ()
    again = vf.create_model("vit_tiny_patch16_224+cb", **SMALL)
    assert not said(lambda: vf.load_weights(again, plain, trained_with=["cb"]))

    vf.save(model, tmp_path / "whole")
    vf.save(model, tmp_path / "added", only="treatments")
    base = trained_model()
    assert not said(lambda: vf.load(tmp_path / "whole"))
    assert not said(lambda: vf.load(tmp_path / "added", onto=base))
    assert inserted(base) == ()


def test_a_mark_lasts_until_the_weights_change(tmp_path: Path) -> None:
    model = vf.treat_(trained_model(), "cbs+adl")
    assert inserted(model) == ("cbs", "adl")
    assert inserted(copy.deepcopy(model)) == ("cbs", "adl")
    assert inserted(copy.deepcopy(model).half()) == ("cbs", "adl")
    assert inserted(copy.deepcopy(model).half().float()) == ("cbs", "adl")
    assert inserted(copy.deepcopy(model).bfloat16().float()) == ("cbs", "adl")
    with vf.untreated(model):
        assert inserted(model) == ()
    assert inserted(model) == ("cbs", "adl")

    folder = vf.save(model, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["inserted"] == ["cbs", "adl"]
    loaded = vf.load(folder)
    assert inserted(loaded) == ("cbs", "adl")

    copied = copy.deepcopy(model)
    take_a_step(copied)
    assert inserted(copied) == ()
    assert "inserted" not in json.loads((vf.save(copied, tmp_path / "trained") / "config.json").read_text())
    vf.treat_(copied, "tap(init=near_identity)")
    assert inserted(copied) == ("tap(init=near_identity)",)
    vf.treat_(model, "tap(init=near_identity)")
    assert inserted(model) == ("cbs", "adl", "tap(init=near_identity)")
    vf.untreat_(model)
    assert inserted(model) == ()


@pytest.mark.parametrize("part", ["context_scale", "head"])
def test_training_a_part_clears_the_mark(part: str) -> None:
    model = vf.treat_(trained_model(), "cbs")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    take_a_step(model)
    assert inserted(model) == ()


def test_a_fresh_model_carries_no_mark() -> None:
    assert inserted(vf.treat_(fresh_model(), "cb+tap+adl")) == ()


SENTENCE = "measures an insertion, not a method"


def test_evaluate_and_diagnose_say_that_they_measure_an_insertion(tmp_path: Path) -> None:
    data = Shapes("val", length=8, size=32)
    plain, model = trained_model(), vf.treat_(trained_model(), "cbs")
    scores = vf.evaluate({"plain": plain, "treated": model}, "clean", data, progress=False, out=tmp_path / "run")
    assert list(scores.insertions) == ["treated"]
    assert SENTENCE in " ".join(str(scores.table()).split())
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "cbs was inserted into treated" in stored["insertions"]["treated"]
    comparison = scores.compare("plain", "treated")
    assert SENTENCE in " ".join(str(comparison.table()).split())
    assert comparison.to_dict()["insertions"] == scores.insertions

    diagnosis = vf.diagnose(model, torch.randn(2, 3, 32, 32))
    assert diagnosis.inserted == "cbs"
    assert SENTENCE in " ".join(str(diagnosis).split())
    diagnosis.save(tmp_path / "diagnosis")
    assert vf.Diagnosis.load(tmp_path / "diagnosis").inserted == "cbs"
    before = vf.diagnose(plain, torch.randn(2, 3, 32, 32))
    assert SENTENCE not in " ".join(str(before).split())
    assert SENTENCE in " ".join(str(before.compare(diagnosis, ["plain", "treated"])).split())

    take_a_step(model)
    assert not vf.evaluate(model, "clean", data, progress=False).insertions
    assert vf.diagnose(model, torch.randn(2, 3, 32, 32)).inserted == ""


def test_a_report_gives_no_verdict_on_an_insertion(tmp_path: Path) -> None:
    plain, model = trained_model(), vf.treat_(trained_model(), "cbs")
    images = torch.rand(40, 3, 32, 32)
    labels = plain.eval()((images - 0.5) / 0.5).argmax(1)
    worse = trained_model()
    with torch.no_grad():
        worse.head.weight.neg_()
    vf.treat_(worse, "adl")
    scores = vf.evaluate(
        {"plain": plain, "worse": worse, "kept": model},
        "clean",
        [(images, labels)],
        progress=False,
        out=tmp_path / "run",
    )
    assert scores["plain"]["top1"] > 90 > 50 > scores["worse"]["top1"]
    written = vf.report(tmp_path / "run")
    (row,) = [row for row in written.rows if row.measure == "top-1 accuracy"]
    assert row.differences["worse"].significant
    assert row.judgement("worse") == row.judgement("kept") == ""
    assert any("not judged because adl was inserted" in sentence for sentence in row.sentences())
    assert set(written.to_dict()["insertions"]) == {"worse", "kept"}
    page = written.path.read_text()
    assert page.count("worse and kept carry treatments that were inserted after their weights were last trained") == 1
    assert "is worse than" not in page


def test_training_clears_the_mark_and_warns_only_where_it_starts_from_trained_weights(tmp_path: Path) -> None:
    steps = ["train_length=32", "epochs=1", "spec=vit_tiny_patch16_224+cb+tap"]
    assert not said(lambda: train(train_tools.tiny(*steps), tmp_path / "scratch"))
    assert "inserted" not in json.loads((tmp_path / "scratch/model/config.json").read_text())

    plain = train_tools.tiny("train_length=32", "epochs=1")
    train(plain, tmp_path / "plain")
    assert is_trained(vf.load(tmp_path / "plain/model"))
    on = [*steps, f"model.weights={tmp_path / 'plain/model'}"]
    still = [*on, "lr=0", "min_lr=0", "warmup_lr=0", "weight_decay=0"]
    for name, changes in (("tuned", on), ("still", still)):
        (sentence,) = said(lambda name=name, changes=changes: train(train_tools.tiny(*changes), tmp_path / name))
        assert sentence.startswith("cb+tap change what these trained weights compute: use cbs+tap(init=near_identity)")
        assert "inserted" not in json.loads((tmp_path / name / "model/config.json").read_text())
    again = [*steps, f"model.weights={tmp_path / 'tuned/model'}"]
    assert not said(lambda: train(train_tools.tiny(*again), tmp_path / "again"))


def test_weights_of_a_backbone_inside_another_model_are_noted(tmp_path: Path) -> None:
    save_file(trained_model().state_dict(), tmp_path / "plain.safetensors")
    options = {key: value for key, value in SMALL.items() if key != "num_classes"} | {"channels": 16, "num_classes": 3}
    model = vf.create_model("upernet:vit_tiny_patch16_224+cb", **options)
    (sentence,) = said(lambda: start_from(model, str(tmp_path / "plain.safetensors")))
    assert sentence.startswith("cb changes")
    assert inserted(model) == ("cb",)
    take = vf.create_model("upernet:vit_tiny_patch16_224+cbs", **options)
    assert not said(lambda: start_from(take, str(tmp_path / "plain.safetensors")))
    assert inserted(take) == ("cbs",)


def test_the_command_line_warns_in_one_line_and_says_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vf.save(trained_model(), tmp_path / "model")
    words = ["--suite", "clean", "--data", "shapes:8", "--limit", "8", "--json"]
    assert main(["evaluate", str(tmp_path / "model"), "--treat", "cb", *words, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if "trained weights compute" in line]
    said = "cb changes what these trained weights compute: use cbs, which starts as the identity, or train further."
    assert lines == [f"vitfocus: {said}"]
    assert next(iter(json.loads(shown.out)["insertions"].values())).startswith("cb was inserted into ")

    assert main(["evaluate", "--compare", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    assert "this measures insertions, not methods" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(tmp_path / "run")]) == 0
    assert SENTENCE in capsys.readouterr().out

    assert main(["diagnose", str(tmp_path / "model"), "--treat", "cbs", "--limit", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert "trained weights compute" not in shown.err
    assert json.loads(shown.out)["inserted"] == "cbs"


def test_weights_given_by_file_are_warned_of_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vf.save(trained_model(), tmp_path / "model")
    save_file(trained_model().state_dict(), tmp_path / "plain.safetensors")
    arguments = ["--treat", "tap", "--weights", str(tmp_path / "plain.safetensors"), "--limit", "2"]
    assert main(["diagnose", str(tmp_path / "model"), *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("trained weights compute") == 1
    assert SENTENCE in " ".join(shown.out.split())
