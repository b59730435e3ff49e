"""Folders and recipes from a stranger: whatever they say, no code of theirs runs and nothing is fetched.

Every door is tried in every command that opens a model. A payload would leave a marker file; sockets and the hub's
functions are replaced by ones that note the call and fail.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.files import digest
from vitfocus.train.recipe import load_recipe

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SMALL = {"depth": 1, "img_size": 32, "patch_size": 16, "embed_dim": 24, "num_heads": 2, "num_classes": 4}
VIT: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 16, "model_type": "vit"},
}


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was reached for on the network; also, nobody is at hand to answer a question."""
    seen: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            seen.append(name)
            raise OSError("there is no network here")

        return call

    import huggingface_hub
    import timm.models._hub as timm_hub
    import transformers.utils.hub as hub

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse("socket"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse("a name server"))
    monkeypatch.setattr(urllib.request, "urlopen", refuse("urllib"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse("torch.hub"))
    for place in (huggingface_hub, timm_hub, hub):
        for name in ("hf_hub_download", "snapshot_download"):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, refuse(name))
    monkeypatch.setattr("builtins.input", refuse("a question"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return seen


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    """A checkpoint's folder whose own Python would leave a marker."""
    folder = tmp_path / "payload"
    folder.mkdir()
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\nfrom transformers import ViTConfig, ViTForImageClassification\n"
    code += "class C(ViTConfig):\n    pass\nclass M(ViTForImageClassification):\n    config_class = C\n"
    (folder / "evil.py").write_text(code)
    points = {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}
    config = {**VIT, "model_type": "evil", "auto_map": points, "architectures": ["M"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def hostile(folder: Path, library: str, base: str, arguments: dict[str, Any], **more: Any) -> Path:
    """A folder as vitfocus.save lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    config = {
        **{"format": 1, "vitfocus": vf.__version__, "library": library, "base": base, "arguments": arguments},
        **{"treatments": [], "only": "all", "sha256": digest(folder / "model.safetensors")},
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def config_of(name: str, config: dict[str, Any], kind: str = "ViTConfig") -> tuple[str, str, dict[str, Any]]:
    return "transformers", name, {"config_class": kind, "config": config}


#: library, base and arguments; PAYLOAD stands for the folder whose Python would run.
DOORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "remote code": ("transformers", "PAYLOAD", {"trust_remote_code": True}),
    "remote code on the hub": ("transformers", "someone/evil", {"trust_remote_code": True}),
    "auto_map": ("transformers", "PAYLOAD", {}),
    "hub name": ("transformers", "google/vit-base-patch16-224", {}),
    "kernel": ("transformers", "ViTForImageClassification", {"attn_implementation": "someone/kernel"}),
    "kernel in a config": config_of("ViTForImageClassification", {**VIT, "attn_implementation": "someone/kernel"}),
    "flash kernel": config_of("ViTForImageClassification", {**VIT, "_attn_implementation": "flash_attention_2"}),
    "function as a class": config_of("pipeline", VIT),
    "function as a config": config_of("ViTForImageClassification", VIT, "AutoModel"),
    "timm inside transformers": config_of(
        "TimmWrapperForImageClassification", {"architecture": "hf-hub:someone/evil"}, "TimmWrapperConfig"
    ),
    "pretrained backbone": config_of(
        "DPTForDepthEstimation",
        {
            "backbone_config": {
                **{"model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}
            }
        },
        "DPTConfig",
    ),
    "timm hub": ("timm", "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", {}),
    "timm old hub": ("timm", "hf_hub:timm/vit_tiny_patch16_224.augreg_in21k", {}),
    "timm folder": ("timm", "local-dir:PAYLOAD", {}),
    "timm pretrained": ("timm", "resnet18.a1_in1k", {"pretrained": True}),
    "timm pretrained cfg": ("timm", "vit_tiny_patch16_224", {"pretrained_cfg": {"url": "http://localhost:9/x"}}),
    "timm checkpoint": ("timm", "vit_tiny_patch16_224", {**SMALL, "checkpoint_path": "PAYLOAD/model.safetensors"}),
    "timm cache": ("timm", "vit_tiny_patch16_224", {**SMALL, "cache_dir": "PAYLOAD"}),
    "torchvision weights": ("torchvision", "vit_b_16", {"weights": "DEFAULT"}),
    "torchvision pretrained": ("torchvision", "resnet18", {"pretrained": True}),
    "torchvision backbone": ("torchvision", "fcn_resnet50", {"weights_backbone": "DEFAULT"}),
    "torchvision backbone unasked": ("torchvision", "fcn_resnet50", {}),
    "upernet on the hub": ("upernet", "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", {}),
    "upernet checkpoint": ("upernet", "vit_tiny_patch16_224", {"checkpoint_path": "PAYLOAD/model.safetensors"}),
    "maskrcnn pretrained": ("maskrcnn", "vit_tiny_patch16_224", {"pretrained_cfg_overlay": {"url": "http://x"}}),
    "smp on the hub": ("smp", "unet:hf-hub:timm/pvt_v2_b0.in1k", {}),
    "smp weights": ("smp", "unet:pvt_v2_b0", {"encoder_weights": "imagenet"}),
}


@pytest.fixture(params=DOORS, ids=[name.replace(" ", "_") for name in DOORS])
def door(request: pytest.FixtureRequest, payload: Path) -> tuple[str, str, dict[str, Any]]:
    text = json.dumps(DOORS[request.param]).replace("PAYLOAD", str(payload))
    library, base, arguments = json.loads(text)
    return library, base, arguments


def spared(tmp_path: Path, touched: list[str]) -> None:
    """Nothing of the stranger's ran, nothing was reached for."""
    assert not (tmp_path / "marker").exists(), "the payload ran"
    assert not touched, f"{', '.join(touched)} was touched"


def commands(model: Path, images: Path, out: Path) -> list[list[str]]:
    """Every command that opens a model by its folder."""
    return [
        ["diagnose", str(model), "--images", str(images), "--out", str(out / "diagnosis")],
        ["evaluate", str(model), "--suite", "clean", "--data", str(images), "--out", str(out / "evaluation")],
        ["models", str(model)],
        ["bench", str(model), "--device", "cpu", "--rounds", "1", "--treat", "cb"],
        ["report", str(model), "--out", str(out / "page.html")],
    ]


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


FOREIGN: dict[str, dict[str, Any]] = {
    "auto_map without a class": {**VIT, "model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}},
    "auto_map": {**VIT, "auto_map": {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}},
    "hub auto_map": {**VIT, "auto_map": {"AutoModelForImageClassification": "someone/evil--evil.M"}},
    "kernel": {**VIT, "attn_implementation": "someone/kernel"},
    "quantizer": {**VIT, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "timm wrapper": {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/evil"},
    "timm model_args": {"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "x"}},
    "timm url": {
        "architecture": "vit_tiny_patch16_224",
        "pretrained_cfg": {"source": "timm", "url": "http://localhost:9/x", "hf_hub_id": "a/b", "custom_load": "hf"},
    },
    "timm hub": {"architecture": "hf-hub:someone/evil", "pretrained_cfg": {}},
}


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
    (payload / "config.json").write_text(json.dumps(config))
    if config.get("model_type") == "vit":
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
