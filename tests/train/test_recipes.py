"""Recipes: checked key by key, overridable, and each shipped one stands on a model that can be built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.train_tools import TINY

from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.tasks.base import build_model, model_arguments
from vitfocus.train import load_recipe, shipped_recipes, train
from vitfocus.train.optimiser import TrainingSchedule
from vitfocus.train.recipe import build_recipe, difference
from vitfocus.treatments.cost import count_parameters
from vitfocus.treatments.spec import split_spec


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.bach=3", "no key 'data.bach': did you mean 'data.batch'"),
        ("btach=3", "did you mean 'batch'"),
        ("batch=many", "data.batch is 'many'; expected a whole number from 1 to 1,000,000"),
        ("batch=0", "data.batch is 0; expected a whole number from 1 to 1,000,000"),
        ("crop=pad", "crop could be data.crop or augment.crop"),
        ("augment.crop=pda", "did you mean 'pad'"),
        ("pretrained=1", "could be model.pretrained or distill.pretrained"),
        ("model.pretrained=1", "model.pretrained is 1; expected true or false"),
        ("scale=[1]", "expected 2 values, each a number from 1e-06 to 1"),
        ("epochs", "write key=value"),
        ("warmup_epochs=1000", "more than epochs"),
        ("epochs=inf", "schedule.epochs is inf; expected a number of at least 1e-09"),
        ("betas=[2,0.9]", "optimiser.betas[0] is 2; expected a number from 0 to 1"),
        ("augment.scale=[0.9,0.1]", "augment.scale is 0.9, 0.1; expected the smaller number first"),
        ("seed=99999999999999999999", "engine.seed is 99999999999999999999; expected a whole number from"),
        ("model.arguments=3", "model.arguments is 3; expected a table of keys and values"),
    ],
)
def test_a_wrong_override_says_what_would_be_right(override: str, message: str) -> None:
    with pytest.raises(VitfocusError) as caught:
        load_recipe("shapes", [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["epochs=1", "steps=7"], "counts steps (steps=7), so epochs would have no effect: give steps=..."),
        (
            ["warmup_epochs=1"],
            "counts steps (steps=1600), so warmup_epochs would have no effect: give warmup_steps=...",
        ),
        (["steps=0", "warmup_steps=5", "warmup_epochs=1"], "counts steps (warmup_steps=5)"),
    ],
)
def test_a_length_that_would_change_nothing_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(VitfocusError) as caught:
        load_recipe("shapes_answer", overrides)
    assert message in str(caught.value)
    keys = "\n".join(override for override in overrides)
    (tmp_path / "child.toml").write_text(f'extends = "shapes_answer"\n[schedule]\n{keys}\n')
    with pytest.raises(VitfocusError) as caught:
        load_recipe(tmp_path / "child.toml")
    assert message in str(caught.value)


def test_a_length_in_epochs_takes_the_place_of_one_in_steps(tmp_path: Path) -> None:
    given = ["epochs=2", "warmup_epochs=1", "evaluate_every=1"]
    by_epochs = load_recipe("shapes_answer", given)
    assert (by_epochs.schedule.epochs, by_epochs.schedule.steps, by_epochs.schedule.warmup_steps) == (2, 0, 0)
    assert (by_epochs.engine.evaluate_every, by_epochs.engine.evaluate_steps) == (1, 0)
    (tmp_path / "child.toml").write_text('extends = "shapes_answer"\n[schedule]\nepochs = 2\n')
    assert load_recipe(tmp_path / "child.toml").schedule.steps == 0
    (tmp_path / "config.toml").write_text(load_recipe("shapes_answer").to_toml())
    assert load_recipe(tmp_path / "config.toml").schedule.steps == 1600
    assert load_recipe(tmp_path / "config.toml", ["epochs=3"]).schedule.steps == 0
    with pytest.raises(VitfocusError, match=r"is a run's folder, and its recipe is .*config\.toml"):
        load_recipe(tmp_path)


def test_a_wrong_file_says_what_would_be_right(tmp_path: Path) -> None:
    for text, message in (
        ("[dat]\nbatch = 3", "no key 'dat': did you mean 'data'"),
        ("[data]\nbacth = 3", "no key 'bacth': did you mean 'batch'"),
        ("data = 3", "data is 3; expected a table of keys and values"),
        ("[data\n", "not valid TOML"),
        ('extends = "shape"', "did you mean 'shapes'"),
        ('extends = "a.toml"', "in a circle"),
        ("name = 5", "name is 5; expected text"),
        ('name = "../up"', "which '../up' cannot be"),
        ('name = ""', "which '' cannot be"),
        ('task = ["classify"]', "task is ['classify']; expected text"),
    ):
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(VitfocusError) as caught:
            load_recipe(tmp_path / "a.toml")
        assert message in str(caught.value)
    (tmp_path / "a.toml").write_bytes(b'about = "caf\xe9"')
    with pytest.raises(VitfocusError, match="not UTF-8 text"):
        load_recipe(tmp_path / "a.toml")
    with pytest.raises(VitfocusError, match="did you mean 'cifar100'"):
        load_recipe("cifar10")


def test_any_text_survives_the_run_folder(tmp_path: Path) -> None:
    text = 'tab\t, bell\a, return\r, delete\x7f, "quotes" and a \\'
    recipe = build_recipe(
        {"about": text, "data": {"root": text}, "model": {"arguments": {"act_layer": {"odd key": 1, "a.b": text}}}}
    )
    (tmp_path / "a.toml").write_text(recipe.to_toml(), encoding="utf-8", newline="")
    read = load_recipe(tmp_path / "a.toml")
    assert read == recipe and not difference(read, recipe)


@pytest.mark.parametrize(
    ("override", "message"),
    [("colour_jitter=0.4", r"set data\.resident=no"), ("distill.kind=soft", "distill.kind needs a teacher")],
)
def test_what_would_be_ignored_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(VitfocusError, match=message):
        train(load_recipe("shapes", [*TINY, override]), out=tmp_path)


#: An override that the recipe does not use, what is said of it, and what beside it makes it count.
UNUSED = [
    (
        "shapes",
        "augment.scale=[0.5,1]",
        "only has an effect with augment.crop=resized",
        ["augment.crop=resized"],
    ),
    ("deit_s", "padding=4", "augment.padding only has an effect with augment.crop=pad", ["augment.crop=pad"]),
    ("deit_s", "colour_jitter=0.4", "beside RandAugment", ["randaugment="]),
    ("shapes", "mix_probability=0.5", "both are off", ["mixup=0.8"]),
    ("shapes", "cutmix_share=0.3", "not both are on", ["mixup=0.8", "cutmix=1"]),
    ("deit_s", "mixup=0.4", "augment.mixup is never chosen", ["mix_probability=0.5"]),
    ("deit_s", "cutmix=0.4", "augment.cutmix is never chosen", ["cutmix_share=0.5"]),
    ("shapes", "schedule.power=1", "only has an effect with schedule.decay=polynomial", ["decay=polynomial"]),
    ("shapes", "drops=[0.5,0.9]", "only has an effect with schedule.decay=drops", ["decay=drops"]),
    ("shapes", "warmup_lr=1e-4", "needs a warm-up", ["warmup_epochs=1"]),
    ("shapes", "adl_warmup_epochs=1", "is for adl, which is not in model.spec", ["spec=vit_tiny_patch16_224+adl"]),
    ("shapes", "betas=[0.9,0.95]", "optimiser.name=adamw", ["optimiser.name=lion"]),
    ("shapes", "eps=1e-6", "optimiser.name=adamw", ["optimiser.name=adafactor"]),
    ("shapes", "head_lr=2", "optimiser.train=head", ["optimiser.train=head"]),
    ("shapes", "distill.kind=hard", "distill.kind needs a teacher", ["distill.teacher=resnet18"]),
    ("shapes", "distill.temperature=2", "distill.kind=soft", ["distill.teacher=resnet18", "distill.kind=soft"]),
    ("shapes", "distill.pretrained=true", "needs a teacher that is named", ["distill.teacher=resnet18"]),
    ("shapes", "root=/data", "Shapes are drawn", ["source=folder"]),
    ("shapes", "val_split=test", "names a validation split on disk", ["source=folder"]),
    ("deit_s", "val_split=test", "without data.holdout", ["holdout=0"]),
    ("shapes", "download=true", "data.download is for torchvision's and timm's data sets", ["source=cifar10"]),
    ("shapes", "data.crop=0.9", "set data.resident=no", ["data.resident=no"]),
    ("shapes", "interpolation=bilinear", "Shapes are drawn at", ["data.resident=no"]),
    ("deit_s", "drop_path=0.2", "set it in model.arguments", ["spec=vit_tiny_patch16_224"]),
    ("shapes_segment", "auxiliary=0.2", "auxiliary head", ["model.arguments.auxiliary_channels=8"]),
    ("shapes_segment", "augment.erase=0.25", "task=segment does not use augment.erase", ["task=classify"]),
    ("shapes_detect", "keep_empty=true", "always show an object", ["source=coco"]),
    ("shapes_answer", "holdout=5", "holds out images of files", ["source=vqav2"]),
]
#: What makes an override idle that would count in the shipped recipe.
IDLE = {
    "mixup=0.4": ["mix_probability=0"],
    "cutmix=0.4": ["cutmix_share=0"],
    "warmup_lr=1e-4": ["warmup_epochs=0"],
    "betas=[0.9,0.95]": ["optimiser.name=sgd"],
    "eps=1e-6": ["optimiser.name=lion"],
    "head_lr=2": ["optimiser.train=added"],
    "drop_path=0.2": ["spec=torchvision:vit_b_16"],
}


@pytest.mark.parametrize(("name", "override", "message", "remedy"), UNUSED)
def test_an_override_that_would_change_nothing_is_refused(
    name: str, override: str, message: str, remedy: list[str], tmp_path: Path
) -> None:
    idle = ["holdout=10"] if name == "deit_s" and override.startswith("val_split") else IDLE.get(override, [])
    with pytest.raises(VitfocusError, match=message):
        load_recipe(name, [*idle, override])
    load_recipe(name, [*idle, override, *remedy])
    # Who brings the key along in a file may still choose otherwise on the command line, and a run's own file is read.
    (tmp_path / "config.toml").write_text(load_recipe(name, [override, *remedy]).to_toml())
    fetches = [override] if override in ("download=true", "distill.pretrained=true") else []  # no file may by itself
    load_recipe(tmp_path / "config.toml", [*idle, *fetches, "lr=1e-4"])


def test_what_is_off_anyway_may_be_said_to_be_off() -> None:
    off = ["root=", "download=false", "adl_warmup_epochs=0", "mix_probability=0", "mixup=0", "cutmix=0", "padding=0"]
    load_recipe("shapes", [*off, "augment.crop=none", "warmup_epochs=0", "warmup_lr=0"])
    with pytest.raises(VitfocusError, match=r"schedule\.decay=polynomial"):  # which would be no decay at all
        load_recipe("shapes", ["schedule.power=0"])


def test_a_crop_that_a_file_brings_along_is_said_to_be_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether images are kept on the device, and so evaluated whole, is sure only when they are there."""
    (tmp_path / "own.toml").write_text('extends = "shapes"\n[data]\ncrop = 0.9\n')
    train(load_recipe(tmp_path / "own.toml", [*TINY, "epochs=1"]), out=tmp_path / "run")
    assert "data.crop=0.9 is not used" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
@pytest.mark.parametrize("choice", ["augment.crop=none", "decay=cosine", "mixup=0", "optimiser.name=sgd"])
def test_a_shipped_recipe_is_never_refused_for_what_it_brings(name: str, choice: str) -> None:
    """One choice makes keys of the recipe idle; they came with it, so nothing is said."""
    recipe = load_recipe(name)
    if choice.partition("=")[0] in ("augment.crop", "mixup") and recipe.task != "classify":
        return
    load_recipe(name, [choice])


@pytest.mark.parametrize(
    ("override", "message"), [("model.spec=", "names no model"), ("randaugment=foo", "foo"), ("betas=[1,1]", "beta")]
)
def test_what_only_the_libraries_know_is_a_sentence_too(override: str, message: str, tmp_path: Path) -> None:
    for resident in ("resident=yes", "resident=no"):
        with pytest.raises(VitfocusError, match=message):
            train(load_recipe("shapes", [*TINY, "workers=0", resident, override]), out=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    recipe = load_recipe("fan_b_hybrid_tap_adl", ["model.arguments.depth=3", 'root=C:\\data "x"', "lr=1e-5"])
    (tmp_path / "config.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "config.toml") == recipe
    (tmp_path / "child.toml").write_text('extends = "config.toml"\n[model]\narguments = { num_heads = 2 }\n')
    child = load_recipe(tmp_path / "child.toml")
    assert child.model.arguments == {"depth": 3, "num_heads": 2}
    assert difference(recipe, child) == ['model.arguments: {"depth": 3} -> {"depth": 3, "num_heads": 2}']


def test_the_papers_settings() -> None:
    plain, small, base = (load_recipe(name) for name in ("deit_s", "deit_s_cb", "deit_b_cbs"))
    assert plain.data.repeats == 3 and small.data.repeats == 1 and base.data.repeats == 3
    assert (base.schedule.warmup_epochs, small.schedule.warmup_epochs) == (10, 5)
    assert base.model.drop_path > small.model.drop_path
    assert {load_recipe(n).schedule.epochs for n in ("pvt_s", "pvtv2_b1_cb", "swin_ti")} == {120}
    assert load_recipe("localvit_ti_cb").schedule.epochs == 150
    assert [load_recipe(f"{n}_tap_adl").engine.ema for n in ("fan_b_hybrid", "rvt_b")] == [0.99992, 0.99996]
    recipe = load_recipe("rvt_b_tap_adl")
    with torch.device("meta"):
        rvt = build_model(recipe, model_arguments(recipe, 1000))
    assert round(count_parameters(rvt) / 1e6, 1) == 92.1 and recipe.augment.patchwise == 16
    for name in ("fan_b_hybrid_tap_adl", "rvt_b_tap_adl"):
        recipe = load_recipe(name)
        assert (recipe.data.batch, recipe.schedule.epochs, TrainingSchedule.of(recipe, 10**6).lr) == (2048, 300, 2e-3)
    assert TrainingSchedule.of(load_recipe("deit_s", ["batch=512"]), 10**6).lr == 5e-4
    assert load_recipe("deit_b_distilled_cb").distill.kind == "hard"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    fetches = recipe.model.pretrained or recipe.distill.pretrained or recipe.data.download
    assert recipe.about and fetches == ("Downloads the" in recipe.about)
    recipe = load_recipe(name, ["model.pretrained=false", "model.weights="])
    if "/" in split_spec(recipe.model.spec)[0]:
        pytest.skip("the model's configuration lies on the Hugging Face hub")
    with torch.device("meta"):
        build_model(recipe, model_arguments(recipe, 10))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    assert "deit_s_cb" in capsys.readouterr().out
    assert main(["train", "shapes", *TINY, "epochs=1", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert build_recipe({}).name == "recipe" and load_recipe(tmp_path / "config.toml").schedule.epochs == 1.0
