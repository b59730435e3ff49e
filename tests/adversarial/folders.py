"""Folders from a stranger, each a door to code or to the network, and a watch on what was reached for."""

from __future__ import annotations

import json
import os
import random
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial.files import changed
from adversarial.harness import Tally
from adversarial.words import tiny_images
from safetensors.torch import save_file

import vitfocus as vf
from vitfocus.core.files import digest
from vitfocus.core.registry import NEEDS_VITFOCUS, TREATMENTS_KEY, TYPE_KEY

SMALL = {"depth": 1, "img_size": 32, "patch_size": 16, "embed_dim": 24, "num_heads": 2, "num_classes": 4}
VIT: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 16, "model_type": "vit"},
}
#: As transformers writes the config of a treated model.
TREATED = {**VIT, "model_type": NEEDS_VITFOCUS, TYPE_KEY: "vit", TREATMENTS_KEY: "cb"}


def watch_network(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Let every way to the network and timm's loader of any file fail; returns the list in which each call is noted."""
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
    monkeypatch.setattr("timm.models._factory.load_checkpoint", refuse("a loader of other files"))
    monkeypatch.setattr("builtins.input", refuse("a question"))
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    return seen


def serve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers end at once, and open no browser."""
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("webbrowser.open", lambda *_, **__: None)


def write_pickle(folder: Path, marker: Path) -> None:
    """In the place of the weights of a folder, a pickle that would leave the marker."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {marker}",)

    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save({"head.weight": Evil()}, folder / "pytorch_model.bin")


def write_payload(tmp_path: Path) -> Path:
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
    "kernel of a part": config_of(
        "CLIPForImageClassification", {"vision_config": {**VIT, "_attn_implementation": "someone/kernel"}}, "CLIPConfig"
    ),
    "flash kernel": config_of("ViTForImageClassification", {**VIT, "_attn_implementation": "flash_attention_2"}),
    "a library that is missing": config_of("DinatForImageClassification", {}, "DinatConfig"),
    "commands to a terminal": ("timm", "vit_tiny_patch16_224", {"\x1b]52;c;ZXZpbA==\x07": 1}),
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
    "timm treated": (
        "timm",
        NEEDS_VITFOCUS,
        {**SMALL, "spec": "vit_tiny_patch16_224+cb", "checkpoint_path": "PAYLOAD/model.safetensors"},
    ),
    "timm treated in itself": ("timm", NEEDS_VITFOCUS, {**SMALL, "spec": f"{NEEDS_VITFOCUS}+cb"}),
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


def commands(model: Path, images: Path, out: Path) -> list[list[str]]:
    """Every command that opens a model by its folder; `serve` needs `serve_nothing`."""
    return [
        ["diagnose", str(model), "--images", str(images), "--limit", "1", "--explore", "--out", str(out / "diagnosis")],
        ["serve", str(model), "--images", str(images), "--limit", "1", "--no-browser"],
        ["reproduce", "cb/figure4", "--rows", "1", "--images", "1", "--weights", f"1={model}", "--out", str(out / "r")],
        ["evaluate", str(model), "--suite", "clean", "--data", str(images), "--out", str(out / "evaluation")],
        ["models", str(model)],
        ["bench", str(model), "--device", "cpu", "--rounds", "1", "--treat", "cb"],
        ["report", str(model), "--out", str(out / "page.html")],
    ]


FOREIGN: dict[str, dict[str, Any]] = {
    "auto_map without a class": {**VIT, "model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}},
    "auto_map": {**VIT, "auto_map": {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}},
    "hub auto_map": {**VIT, "auto_map": {"AutoModelForImageClassification": "someone/evil--evil.M"}},
    "kernel": {**VIT, "attn_implementation": "someone/kernel"},
    "kernel of a part": {"model_type": "clip", "vision_config": {**VIT, "attn_implementation": "someone/kernel"}},
    "quantizer": {**VIT, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "timm wrapper": {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/evil"},
    "treated auto_map": {**TREATED, "auto_map": {"AutoConfig": "evil.C", "AutoModelForImageClassification": "evil.M"}},
    "treated quantizer": {**TREATED, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "treated kernel": {**TREATED, "attn_implementation": "someone/kernel"},
    "treated remote code": {**TREATED, "trust_remote_code": True, "auto_map": {"AutoConfig": "someone/evil--evil.C"}},
    "treated timm wrapper": {**TREATED, TYPE_KEY: "timm_wrapper", "architecture": "hf-hub:someone/evil"},
    "treated in a list": {**TREATED, TYPE_KEY: ["vit"]},
    "treated in nothing": {key: value for key, value in TREATED.items() if key != TYPE_KEY},
    "timm model_args": {"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "x"}},
    "timm treated": {
        "architecture": NEEDS_VITFOCUS,
        "model_args": {**SMALL, "spec": "vit_tiny_patch16_224", "checkpoint_path": "PAYLOAD/model.safetensors"},
    },
    "commands to a terminal": {"architecture": "vit_tiny_patch16_224", "model_args": {"\x1b]0;evil\x07": 1}},
    "timm url": {
        "architecture": "vit_tiny_patch16_224",
        "pretrained_cfg": {"source": "timm", "url": "http://localhost:9/x", "hf_hub_id": "a/b", "custom_load": "hf"},
    },
    "timm hub": {"architecture": "hf-hub:someone/evil", "pretrained_cfg": {}},
}


def folders(tally: Tally, tries: int, folder: Path) -> None:
    """The doors and changes of them, as the folder of a model and of other libraries, in every command."""
    draw = random.Random(tally.seed)
    payload, images = write_payload(folder), tiny_images(folder / "images")
    tally.marker = folder / "marker"
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = watch_network(monkeypatch, folder)
        serve_nothing(monkeypatch)
        while tally.tried["hostile folders"] < tries:
            if draw.random() < 0.7:
                name, (library, base, arguments) = draw.choice([*DOORS.items()])
                text = json.dumps([library, base, arguments]).replace("PAYLOAD", str(payload))
                library, base, arguments = json.loads(text)
                if draw.random() < 0.6:
                    arguments = changed(arguments, draw)
                model = hostile(folder / "model", library, base, arguments)
            else:
                name, config = draw.choice([*FOREIGN.items()])
                model = payload
                made = changed(config, draw) if draw.random() < 0.6 else config
                (payload / "config.json").write_text(json.dumps(made).replace("PAYLOAD", str(payload)))
            words = draw.choice(commands(model, images, folder / "out"))
            tally.command("hostile folders", words)
            if seen:
                tally.failed["hostile folders"].append(f"{name} in {words[0]}: {', '.join(seen)} was touched")
                seen.clear()
    tally.marker = None
