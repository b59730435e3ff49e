"""Folders and recipes from a stranger: whatever they say, no code of theirs runs and nothing is fetched.

Every door is tried in every command that opens a model. A payload would leave a marker file; sockets and the hub's
functions are replaced by ones that note the call and fail.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from adversarial.folders import (
    DOORS,
    FOREIGN,
    SMALL,
    VIT,
    commands,
    hostile,
    serve_nothing,
    watch_network,
    write_payload,
    write_pickle,
)
from PIL import Image
from safetensors.torch import save_file

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.registry import TYPE_KEY
from vitfocus.reproduce.items import load_item
from vitfocus.reproduce.plan import DataFolders, plan_row
from vitfocus.train.recipe import load_recipe
from vitfocus.treatments.safe_arguments import transformers_config

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was reached for on the network; also, nobody is at hand to answer a question."""
    serve_nothing(monkeypatch)
    return watch_network(monkeypatch, tmp_path)


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    """A checkpoint's folder whose own Python would leave a marker."""
    return write_payload(tmp_path)


@pytest.fixture(params=DOORS, ids=[name.replace(" ", "_") for name in DOORS])
def door(request: pytest.FixtureRequest, payload: Path) -> tuple[str, str, dict[str, Any]]:
    text = json.dumps(DOORS[request.param]).replace("PAYLOAD", str(payload))
    library, base, arguments = json.loads(text)
    return library, base, arguments


def spared(tmp_path: Path, touched: list[str]) -> None:
    """Nothing of the stranger's ran, nothing was reached for."""
    assert not (tmp_path / "marker").exists(), "the payload ran"
    assert not touched, f"{', '.join(touched)} was touched"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for number in range(SMALL["num_classes"]):
        (folder / str(number)).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / str(number) / "a.png")
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    return folder


def test_a_model_folder_in_every_command(
    door: tuple[str, str, dict[str, Any]],
    images: Path,
    tmp_path: Path,
    touched: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence and exit status 2, or a report that says what could not be read."""
    model = hostile(tmp_path / "run" / "model", *door)
    (tmp_path / "run" / "config.toml").write_text(load_recipe("shapes").to_toml())
    for arguments in commands(model, images, tmp_path / "out"):
        code = main(arguments)
        said = capsys.readouterr().err
        assert "Traceback" not in said and (code != 0 or arguments[0] == "report"), (arguments[0], said)
        spared(tmp_path, touched)
    code = main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "run.html")])
    spared(tmp_path, touched)


def test_a_recipe(
    door: tuple[str, str, dict[str, Any]], tmp_path: Path, touched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    library, base, arguments = door
    spec = base if library == "timm" else f"{library}:{base}"
    lines = ["[data]", 'source = "shapes"', "size = 32", "train_length = 8", "val_length = 8", "batch = 4"]
    lines += ["[schedule]", "epochs = 1", "warmup_epochs = 0"]
    tables = ", ".join(f"{key} = {_toml(value)}" for key, value in arguments.items())
    recipe = tmp_path / "stranger.toml"
    recipe.write_text("\n".join([*lines, "[model]", f"spec = {json.dumps(spec)}", f"arguments = {{{tables}}}"]))
    code = main(["train", str(recipe), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    spared(tmp_path, touched)
    assert code == 2 and said.splitlines()[-1].startswith("vitfocus: "), said


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ('[model]\nspec = "vit_tiny_patch16_224"\npretrained = true', "model.pretrained"),
        ('[model]\nspec = "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k+cb"', "model.spec"),
        ('[model]\nspec = "transformers:google/vit-base-patch16-224"', "model.spec"),
        ('[model]\nspec = "smp:unet:hf-hub:timm/pvt_v2_b0.in1k"', "model.spec"),
        ('[distill]\nteacher = "hf-hub:someone/teacher"\nweights = "x"', "distill.teacher"),
        ('[distill]\nteacher = "regnety_160.deit_in1k"\npretrained = true', "distill.pretrained"),
        ('[data]\nsource = "cifar10"\ndownload = true', "data.download"),
        ('[data]\nsource = "timm:hfds/someone/evil"', "data.source"),
        ('[data]\nsource = "timm:wds/evil"\nroot = "pipe:touch marker"', "data.source"),
        ('[data]\nsource = "timm:folder"\nroot = "x.tar"', "data.source"),
    ],
)
def test_a_recipe_file_fetches_nothing_by_itself(
    section: str, key: str, tmp_path: Path, touched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither itself nor as the base of another; typed as an override it counts as the person's own word."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(f"{section}\n")
    second.write_text('extends = "a.toml"\n')
    for recipe in (first, second):
        assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
        assert f"says {key} = " in capsys.readouterr().err
    spared(tmp_path, touched)
    recipe = load_recipe("finetune") if key == "model.pretrained" else None
    if recipe is not None:
        assert recipe.model.pretrained  # a shipped recipe is ours
        assert load_recipe(first, ["model.pretrained=true"]).model.pretrained


@pytest.mark.parametrize("key", ["model.weights", "distill.weights", "distill.teacher"])
def test_folders_that_a_recipe_names(
    key: str,
    door: tuple[str, str, dict[str, Any]],
    tmp_path: Path,
    touched: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = hostile(tmp_path / "weights", *door)
    teacher = [] if key != "distill.weights" else ["distill.teacher=resnet10t"]
    small = ["train_length=8", "val_length=8", "epochs=1", "batch=4", "model.arguments.depth=1"]
    assert main(["train", "shapes", *small, *teacher, f"{key}={folder}", "--out", str(tmp_path / "run")]) != 0
    assert "Traceback" not in capsys.readouterr().err
    spared(tmp_path, touched)


@pytest.mark.parametrize("config", FOREIGN.values(), ids=[name.replace(" ", "_") for name in FOREIGN])
def test_folders_of_other_libraries_in_every_command(
    config: dict[str, Any],
    payload: Path,
    images: Path,
    tmp_path: Path,
    touched: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such a folder may hold a sound model all the same, which then opens."""
    (payload / "config.json").write_text(json.dumps(config).replace("PAYLOAD", str(payload)))
    if "vit" in (config.get("model_type"), config.get(TYPE_KEY)):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
        save_file(model.state_dict(), payload / "model.safetensors", metadata={"format": "pt"})
    for arguments in commands(payload, images, tmp_path / "out"):
        main(arguments)
        assert "Traceback" not in capsys.readouterr().err
        spared(tmp_path, touched)


def test_what_a_file_may_say_still_loads(tmp_path: Path, touched: list[str]) -> None:
    """Sizes, switches and names of layers; and what a config brings along for others is left out."""
    model = vf.create_model("vit_tiny_patch16_224+cb", **SMALL, act_layer="relu", global_pool="avg", qkv_bias=False)
    again = vf.load(vf.save(model, tmp_path / "timm"))
    assert [*again.state_dict()] == [*model.state_dict()]
    other = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    folder = vf.save(other, tmp_path / "hf")
    content = json.loads((folder / "config.json").read_text())
    content["arguments"]["config"] |= {"auto_map": {"AutoModel": "evil.M"}, "of_another_version": 1}
    (folder / "config.json").write_text(json.dumps(content))
    loaded: Any = vf.load(folder)
    assert not hasattr(loaded.config, "auto_map") and loaded.config.hidden_size == 24
    spared(tmp_path, touched)


def test_the_commands_open_a_sound_folder(images: Path, tmp_path: Path, touched: list[str]) -> None:
    """So what is refused above is refused for what the folder says, not for how the command was typed."""
    model = vf.save(vf.create_model("vit_tiny_patch16_224", **SMALL), tmp_path / "run" / "model")
    (tmp_path / "run" / "config.toml").write_text(load_recipe("shapes").to_toml())
    for arguments in commands(model, images, tmp_path / "out"):
        if arguments[0] != "report":  # for which a model alone is not enough
            assert main(arguments) == 0, arguments[0]
    spared(tmp_path, touched)


def test_a_run_that_reproduce_takes_for_finished(
    door: tuple[str, str, dict[str, Any]], tmp_path: Path, touched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of results comes from a stranger: a run in it claims to be finished, and its model is a door."""
    for name in ("cb/figure4", "cb/table8"):  # which diagnose and evaluate the model
        out = tmp_path / name.replace("/", "-")
        item = load_item(name)
        run = plan_row(item, item.rows[0], "smoke", DataFolders(), out / "smoke")
        assert run is not None and run.recipe is not None
        hostile(run.folder / "model", *door)
        (run.folder / "config.toml").write_text(run.recipe.to_toml())
        (run.folder / "results.json").write_text(json.dumps({"finished": True, "steps": 1, "top1": 99.0}))
        code = main(["reproduce", name, "--rows", "1", "--images", "4", "--out", str(out)])
        said = capsys.readouterr().err
        spared(tmp_path, touched)
        assert code == 2 and said.splitlines()[-1].startswith("vitfocus: ") and "Traceback" not in said, said
        assert not list((out / "smoke" / "items").rglob("*.json"))


def test_a_recipe_by_its_path_is_no_built_in_one(
    tmp_path: Path, touched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its ending, and as the base of another; a folder is not a name on the hub, whatever it is called."""
    (tmp_path / "evil.toml").write_text('[model]\nspec = "vit_tiny_patch16_224"\npretrained = true\n')
    assert main(["train", str(tmp_path / "evil"), "--out", str(tmp_path / "run")]) == 2
    assert f"write {tmp_path / 'evil.toml'}" in capsys.readouterr().err
    (tmp_path / "base.toml").write_text(f'extends = "{tmp_path / "evil"}"\n')
    assert main(["train", str(tmp_path / "base.toml"), "--out", str(tmp_path / "run")]) == 2
    spared(tmp_path, touched)


def test_a_root_that_a_loader_would_run_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The person typed the loader's name; what it is given is still the file's word."""
    (tmp_path / "a.toml").write_text(f'[data]\nroot = "pipe:touch {tmp_path / "marker"}"\n')
    assert main(["train", str(tmp_path / "a.toml"), "data.source=timm:wds/x", "--out", str(tmp_path / "run")]) == 2
    assert "says data.root = " in capsys.readouterr().err and not (tmp_path / "marker").exists()


def test_folders_named_like_places_on_the_hub(
    tmp_path: Path, touched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "hf-hub:someone/evil"
    vf.save(vf.create_model("vit_tiny_patch16_224", **SMALL), Path(name))
    small = ["train_length=8", "val_length=8", "epochs=1", "batch=4", "model.arguments.depth=1"]
    for key in ("model.weights", "distill.teacher", "distill.weights"):
        Path("a.toml").write_text(f'extends = "shapes"\n[{key.split(".")[0]}]\n{key.split(".")[1]} = "{name}"\n')
        main(["train", "a.toml", *small, "--out", "run"])
        assert "Traceback" not in capsys.readouterr().err
    main(["report", ".", "--explore", "--out", "page.html"])
    spared(tmp_path, touched)


@pytest.mark.parametrize("config", [VIT, {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}])
def test_pickled_weights_of_other_libraries(
    config: dict[str, Any], payload: Path, images: Path, tmp_path: Path, touched: list[str]
) -> None:
    (payload / "config.json").write_text(json.dumps(config))
    write_pickle(payload, tmp_path / "marker")
    for words in commands(payload, images, tmp_path / "out"):
        assert main(words) == 2, words
        spared(tmp_path, touched)


def test_an_adapter_opens_no_other_model(payload: Path, tmp_path: Path, touched: list[str]) -> None:
    (payload / "config.json").write_text(json.dumps(VIT))
    (payload / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/evil"}))
    with pytest.raises(vf.VitfocusError, match="adapter"):
        vf.open_model(str(payload))
    spared(tmp_path, touched)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("part", ["../outside", "/dev/zero", "fifo", "x" * 300, "a\0b", ""])
def test_an_index_of_weights_names_files_of_its_folder(kind: str, part: str, payload: Path, touched: list[str]) -> None:
    """In whichever file transformers looks for the parts of the weights."""
    (payload / "config.json").write_text(json.dumps(VIT))
    (payload / "model.safetensors").rename(payload.parent / "outside")
    os.mkfifo(payload / "fifo")
    index = payload / f"{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": part}}))
    with pytest.raises(vf.VitfocusError, match="expected a file of weights in the same folder"):
        vf.open_model(str(payload))
    index.write_text("[" * 100_000)
    with pytest.raises(vf.VitfocusError, match="64 levels"):
        vf.open_model(str(payload))


def test_no_error_advises_to_run_a_pickle(payload: Path, tmp_path: Path) -> None:
    for config in (VIT, {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}):
        (payload / "config.json").write_text(json.dumps(config))
        write_pickle(payload, tmp_path / "marker")
        with pytest.raises(vf.VitfocusError, match="hold more than tensors and plain values"):
            vf.open_model(str(payload))


@pytest.mark.parametrize(
    "config",
    [
        *("[" * 100_000, "[]", "null", '{"model_type": ["vit"]}', '{"model_type": "vit", "num_labels": "x"}'),
        *('{"model_type": "vit", "configuration_files": [1]}', '{"model_type": "vit", "id2label": [1, 2]}'),
    ],
)
def test_a_recipe_on_a_folder_with_a_malformed_config(
    config: str, payload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (payload / "config.json").write_text(config)
    words = [f"spec=transformers:{payload}", "train_length=8", "val_length=8", "model.arguments={num_labels=3}"]
    assert main(["train", "shapes", *words, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("vitfocus: ")


def test_the_parts_that_a_config_does_not_declare(payload: Path) -> None:
    """Of several models, in the lowest version of transformers; the model's own code then makes a config of a part."""

    class Whole(transformers.PretrainedConfig):  # type: ignore[misc,name-defined]
        model_type = "whole"

        def __init__(self, part: Any = None, **others: Any) -> None:
            super().__init__(**others)
            self.part = transformers.ViTConfig(**(part or {}))

    evil = {"trust_remote_code": True, "auto_map": {"AutoConfig": "evil.C"}, "name_or_path": str(payload)}
    evil |= {"_attn_implementation_internal": "someone/kernel", "attn_implementation": "someone/kernel"}
    found = transformers_config(Whole, {"part": {**evil, "hidden_size": 24}}, "config.json").part
    assert found.hidden_size == 24 and not {"auto_map", "trust_remote_code"} & set(vars(found))
    assert "someone/kernel" not in vars(found).values() and str(payload) not in vars(found).values()


def test_a_part_with_a_kernel_is_refused() -> None:
    """However it got there."""

    class Whole(transformers.PretrainedConfig):  # type: ignore[misc,name-defined]
        model_type = "whole"

        def __init__(self, **others: Any) -> None:
            super().__init__(**others)
            self.part = transformers.ViTConfig(attn_implementation="someone/kernel")

    with pytest.raises(vf.VitfocusError, match="may fetch a kernel"):
        transformers_config(Whole, {}, "config.json")
