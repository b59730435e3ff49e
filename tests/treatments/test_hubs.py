"""Nothing is lost on the way through timm, transformers, smp and peft: it comes back, or is refused loudly."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import build
from safetensors.torch import load_file, save_file
from torch import nn

import vitfocus as vf
from vitfocus.core.registry import NEEDS_VITFOCUS
from vitfocus.robustness.results import Scores
from vitfocus.treatments.hub import model_card
from vitfocus.treatments.spec import STATE_KEY

IMAGES = torch.randn(2, 3, 32, 32)
#: A small decoder of smp.
DPT = {
    **{"encoder_weights": None, "classes": 3, "encoder_depth": 2},
    **{"decoder_intermediate_channels": (16, 32), "decoder_fusion_channels": 16},
}
SMALL = {"depth": 2, "img_size": 32, "embed_dim": 24, "num_heads": 2, "num_classes": 3}


def shaken(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tiny_timm(spec: str = "cb+tap") -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", **SMALL)
    return shaken(vf.treat_(model, spec) if spec else model)


def tiny_hf(spec: str = "cb+tap") -> Any:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    model = transformers.ViTForImageClassification(config)
    return shaken(vf.treat_(model, spec) if spec else model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model.eval()(IMAGES)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("spec", ["", "cb", "cbs+tap+adl"])
def test_timm_opens_what_was_saved(spec: str, tmp_path: Path) -> None:
    model = tiny_timm(spec)
    vf.save(model, tmp_path)
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(logits(opened), logits(model)) and vf.applied(opened) == vf.applied(model)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)
    assert logits(other).shape == (2, 5) and vf.applied(other) == vf.applied(model)
    assert torch.equal(logits(vf.open_model(str(tmp_path))), logits(model))


@pytest.mark.parametrize("make", [tiny_timm, tiny_hf])
@pytest.mark.parametrize("spec", ["", "cbs+tap"])
def test_transformers_opens_what_was_saved(make: Any, spec: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from PIL import Image

    model = make(spec)
    vf.save(model, tmp_path / "a")
    opened = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "a")
    assert torch.equal(logits(opened), logits(model)) and vf.applied(opened) == vf.applied(model)
    pipeline = transformers.pipeline("image-classification", model=str(tmp_path / "a"))
    assert len(pipeline(Image.new("RGB", (50, 40), "teal"))) == 3
    opened.save_pretrained(tmp_path / "b")  # their folder: nothing of ours stays in it that could go stale
    assert not {"sha256", "vitfocus", "format", "only"} & set(json.loads((tmp_path / "b" / "config.json").read_text()))
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "b")
    assert torch.equal(logits(again), logits(model)) and vf.applied(again) == vf.applied(model)


@pytest.mark.parametrize("spec", ["cb", "tap"])
def test_checkpoints_of_transformers_come_back(spec: str, tmp_path: Path) -> None:
    model = tiny_hf(spec)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[STATE_KEY] == spec
    file = tmp_path / "model.safetensors"
    on_disk = any(name.startswith("vit.encoder.layer.") for name in load_file(file))
    assert on_disk, "transformers no longer writes other names than it has in memory"
    treated, plain = tiny_hf(spec), tiny_hf("")
    vf.load_weights(plain, file, treat=True)
    vf.load_weights(treated, file)
    for back in (type(model).from_pretrained(tmp_path), vf.open_model(str(tmp_path)), treated, plain):
        assert torch.equal(logits(back), logits(model)) and vf.applied(back) == vf.applied(model)
    vf.untreat_(model).save_pretrained(tmp_path / "plain")
    assert STATE_KEY not in json.loads((tmp_path / "plain" / "config.json").read_text())


#: Every kind of name and state that a treatment adds.
ADDING = ["sigma(init=spectral)", "ttr(neurons=[[0,3],[1,5]])", "registers+gate+qknorm", "cbs+se"]


@pytest.mark.parametrize("make", [tiny_timm, tiny_hf])
@pytest.mark.parametrize("spec", ADDING)
def test_what_any_treatment_adds_comes_back(make: Any, spec: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    model = make(spec)
    vf.save(model, tmp_path)
    auto = transformers.AutoModelForImageClassification
    if spec.startswith("sigma") and transformers.__version__ < "5":
        with pytest.raises(vf.VitfocusError, match=r"use transformers 5, or vitfocus\.load"):
            auto.from_pretrained(tmp_path)
        torch.testing.assert_close(logits(vf.load(tmp_path)), logits(model), atol=1e-6, rtol=1e-5)
        return
    opened = [auto.from_pretrained(tmp_path), vf.load(tmp_path)]
    if make is tiny_hf:
        model.save_pretrained(tmp_path / "theirs")
        opened += [auto.from_pretrained(tmp_path / "theirs"), vf.open_model(str(tmp_path / "theirs"))]
    for one in opened:
        assert vf.applied(one) == vf.applied(model)
        torch.testing.assert_close(logits(one), logits(model), atol=1e-6, rtol=1e-5)


def test_a_checkpoint_that_lacks_what_it_records_is_refused(tmp_path: Path) -> None:
    model = tiny_hf("cbs")
    model.save_pretrained(tmp_path)
    kept = {key: value for key, value in load_file(tmp_path / "model.safetensors").items() if "context" not in key}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(vf.VitfocusError, match=r"records cbs and lacks vit\..*\.0\.context_mlp\..* \(2 names\)"):
        type(model).from_pretrained(tmp_path)
    save_file({key: value for key, value in kept.items() if STATE_KEY not in key}, tmp_path / "model.safetensors")
    assert vf.applied(type(model).from_pretrained(tmp_path))  # a plain checkpoint into a treated model


def test_transformers_builds_a_treated_timm_model_of_another_size(tmp_path: Path) -> None:
    """CrossViT takes the size of its images from what timm knows of its name."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    model = vf.treat_(timm.create_model("crossvit_tiny_240", num_classes=3), "cb").eval()
    vf.save(model, tmp_path)
    opened = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.randn(1, 3, 240, 240)
    with torch.no_grad():
        assert torch.equal(opened(images).logits, model(images))


def test_a_checkpoint_of_transformers_keeps_its_task(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1] * 4, "num_labels": 3}
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16)
    model = shaken(vf.treat_(transformers.SegformerForSemanticSegmentation(config), "cb"))
    model.save_pretrained(tmp_path)
    opened = vf.open_model(str(tmp_path))
    assert type(opened) is type(model) and torch.equal(logits(opened), logits(model))
    other = vf.create_model(f"transformers:{tmp_path}", num_labels=5)
    assert type(other).__name__ == "SegformerForImageClassification"


#: Models of transformers whose transformer is a part with a config of its own, or that are no classifiers of images.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "SiglipForImageClassification": ("Siglip", {"num_labels": 3}),
    "DPTForDepthEstimation": (
        "Dinov2",
        {
            **{"neck_hidden_sizes": [16, 16], "reassemble_factors": [2, 1], "fusion_hidden_size": 16},
            **{"backbone_out_indices": None, "hidden_size": 24},
        },
    ),
    "YolosForObjectDetection": ("", {"image_size": [32, 32], "num_detection_tokens": 4}),
    "CLIPVisionModel": ("", {}),
}


@pytest.mark.parametrize("name", PARTS)
def test_treatments_of_a_part_and_of_other_tasks_come_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    cls, (part, options) = getattr(transformers, name), PARTS[name]
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "image_size": 32, "patch_size": 8}
    if part == "Siglip":
        options = {"vision_config": sizes, **options}
    elif part:
        sizes |= {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
        options = {"backbone_config": transformers.Dinov2Config(**sizes), **options}
    else:
        options = sizes | options
    torch.manual_seed(0)  # the depth of DPT is cut off at zero, and may be zero everywhere
    model = shaken(vf.treat_(cls(cls.config_class(**options)), "cb"))

    def output(one: Any) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = one.eval()(IMAGES)[0]
        return made

    model.save_pretrained(tmp_path / "theirs")
    vf.save(model, tmp_path / "ours")
    opened = [
        *(cls.from_pretrained(tmp_path / folder) for folder in ("theirs", "ours")),
        *(vf.open_model(str(tmp_path / folder)) for folder in ("theirs", "ours")),
    ]
    for one in opened:
        assert type(one) is cls and vf.applied(one) == vf.applied(model)
        torch.testing.assert_close(output(one), output(model))
    plain = cls.from_pretrained(tmp_path / "theirs")
    assert not torch.allclose(output(vf.untreat_(plain)), output(model))


def test_savers_of_timm_and_smp_do_not_drop_treatments(tmp_path: Path) -> None:
    model = tiny_timm("cb")
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=dict(SMALL))
    notes = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]["notes"]
    assert notes == [f"{STATE_KEY}: cb"]
    with pytest.raises(RuntimeError, match=STATE_KEY):
        timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    opened = vf.open_model(str(tmp_path / "timm"))
    assert torch.equal(logits(opened), logits(model)) and vf.applied(opened) == vf.applied(model)
    assert "notes" not in vf.untreat_(model).pretrained_cfg
    smp = pytest.importorskip("segmentation_models_pytorch", reason="the seg extra is not installed")
    segmenter = smp.DPT("tu-vit_tiny_patch16_224", **DPT)
    vf.treat_(segmenter, "cb").save_pretrained(tmp_path / "smp")
    with pytest.raises(RuntimeError, match=STATE_KEY):
        smp.from_pretrained(tmp_path / "smp")
    with pytest.raises(vf.VitfocusError, match=r"save it with its save_pretrained and restore it with .*treat=True"):
        vf.save(segmenter, tmp_path / "no")
    plain = smp.DPT("tu-vit_tiny_patch16_224", **DPT)
    vf.load_weights(plain, tmp_path / "smp" / "model.safetensors", treat=True)
    assert vf.applied(plain) == vf.applied(segmenter)


OPENERS = {
    "timm": "import timm; timm.create_model('local-dir:{}', pretrained=True)",
    "auto": "import transformers; transformers.AutoModelForImageClassification.from_pretrained('{}')",
    "pipeline": "import transformers; transformers.pipeline('image-classification', model='{}')",
}


@pytest.mark.parametrize(("how", "save"), [("timm", vf.save), ("auto", vf.save), ("auto", None), ("pipeline", None)])
def test_without_vitfocus_the_folder_says_what_is_missing(how: str, save: Any, tmp_path: Path) -> None:
    model = tiny_timm("cb") if how == "timm" else tiny_hf("cb")
    save(model, tmp_path) if save is not None else model.save_pretrained(tmp_path)
    run = subprocess.run([sys.executable, "-c", OPENERS[how].format(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 1 and NEEDS_VITFOCUS in run.stderr


def test_a_class_of_transformers_warns_without_vitfocus(tmp_path: Path) -> None:
    tiny_hf("cb").save_pretrained(tmp_path)
    code = f"import transformers; transformers.ViTForImageClassification.from_pretrained('{tmp_path}')"
    for before, expected in (("", True), ("import vitfocus; ", False)):
        run = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True)
        told = run.stderr.replace("`", "")  # which older versions leave out
        assert run.returncode == 0 and (f"model of type {NEEDS_VITFOCUS}" in told) == expected, run.stderr
        assert (STATE_KEY in run.stderr) == expected, run.stderr


def test_a_hostile_folder_names_no_other_model(tmp_path: Path) -> None:
    vf.save(tiny_timm("cb"), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())

    def opened(**arguments: Any) -> Any:
        changed = {**content, "model_args": {**content["model_args"], **arguments}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return timm.create_model(f"local-dir:{tmp_path}", pretrained=True)

    for spec in ("hf-hub:evil/model+cb", "/etc+cb", f"local-dir:{tmp_path}+cb"):
        with pytest.raises(vf.VitfocusError, match="only name a model that is built into timm"):
            opened(spec=spec)
    with pytest.raises(vf.VitfocusError, match="sets checkpoint_path, which no file may set"):
        opened(checkpoint_path="/tmp/evil.pth")
    with pytest.raises(vf.VitfocusError, match="no treatment 'rm'"):
        opened(spec="vit_tiny_patch16_224+rm")


MEASURED = Scores(
    "clean",
    100,
    {"a": {"top1": 75.0, "top1_interval": (71.0, 79.0), "cells": {}}},
    fingerprint={"data": {"digest": "abc"}, "protocol": {"size": 32}},
)


def test_the_card_says_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def upload(self: Any, *, repo_id: str, folder_path: str, **options: Any) -> str:
        shutil.copytree(folder_path, tmp_path / repo_id)
        return f"https://example.invalid/{repo_id}"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, name, exist_ok: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(tmp_path / name))
    model = tiny_timm("cb")
    vf.push(vf.save(model, tmp_path / "run" / "model").parent, "me/vit", scores=MEASURED)
    text = (tmp_path / "me" / "vit" / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.pipeline_tag == "image-classification"
    assert card.data.eval_results[0].metric_value == 75.0
    said = ["`vit_tiny_patch16_224` of timm, with `cb`", "| 75.00 % | 71.00 to 79.00 |", 'vf.load("hf-hub:me/vit")']
    assert all(part in text for part in said) and "fingerprint `" in text
    for name in ("hf-hub:me/vit", "hf_hub:me/vit"):
        assert torch.equal(logits(vf.load(name)), logits(model))


def test_text_from_a_file_stays_text_in_the_card() -> None:
    hostile = "x`\n---\nlicense: mit\n# [click](javascript:alert(1))"
    card = model_card(tiny_timm(""), "vit_tiny_patch16_224", "timm", {"task": "classify", "source": hostile})
    assert card.count("\n---\n") == 1 and "\n#" not in card.replace("\n# `", "").replace("\n## ", "")


def test_an_adapter_knows_its_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = tiny_timm("cb")  # without a parameter: nothing else in the adapter could tell
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["qkv"], init_lora_weights=False))
    with pytest.raises(vf.VitfocusError, match=r"carries a peft adapter: .*merge_and_unload"):
        vf.save(model, tmp_path / "no")
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(vf.VitfocusError, match=r"trained on a model with cb, and this one has none: use vf\.treat_"):
        peft.PeftModel.from_pretrained(tiny_timm(""), tmp_path / "adapter")
    expected = logits(model)
    merged = model.merge_and_unload()
    assert [str(one) for one in vf.applied(merged)] == ["cb"]
    torch.testing.assert_close(logits(vf.load(vf.save(merged, tmp_path / "merged"))), expected, atol=1e-5, rtol=1e-4)


def test_peft_trains_what_treatments_added(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    parts = ["context_mlp", "dilation_predictor", "attention_gate", "registers"]
    model = tiny_timm("cbs+tap+gate+registers")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], modules_to_save=parts)).train()
    model(IMAGES).square().mean().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(any(part in name for name in trained) for part in parts)
    assert all(grad is not None for grad in trained.values())
    with vf.untreated(model):
        assert not any(part in name for name in model.state_dict() for part in parts)
    merged = model.merge_and_unload()
    expected = logits(merged)
    assert torch.equal(logits(vf.load(vf.save(merged, tmp_path))), expected)
    assert not any(part in name for name in vf.untreat_(merged).state_dict() for part in parts)


def test_an_adapter_is_not_merged_into_a_computed_weight() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(tiny_timm("sigma"), peft.LoraConfig(target_modules=["qkv"], init_lora_weights=False))
    before = copy.deepcopy(model.train().state_dict())
    model(IMAGES)  # the adapter has no place for vectors of frozen weights that would change
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(vf.VitfocusError, match=r"attn\.qkv has an adapter and rescales its weight"):
            merge()
    other = peft.get_peft_model(tiny_timm("sigma(site=mlp)"), peft.LoraConfig(target_modules=["qkv"]))
    assert vf.applied(other.merge_and_unload())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = build("vit")[0]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images).mean(-1)


def test_a_wrapper_and_the_model_inside_know_the_same() -> None:
    for treated, other in ((lambda m: m, lambda m: m.body), (lambda m: m.body, lambda m: m)):
        model = Holder()
        vf.treat_(treated(model), "cb")
        vf.treat_(other(model), "tap")
        assert [str(one) for one in vf.applied(model)] == [str(one) for one in vf.applied(model.body)] == ["cb", "tap"]
        assert [name for name in model.state_dict() if STATE_KEY in name] == [f"body.{STATE_KEY}"]
        with pytest.raises(vf.VitfocusError, match=r"Holder of .*: save it with torch\.save\(.*treat=True"):
            vf.save(model, "never")
        vf.untreat_(other(model))
        assert not vf.applied(model) and not any(STATE_KEY in name for name in model.state_dict())


class Steps(nn.Module):
    """A module whose steps call its network, so that it has no forward pass, like many of Lightning's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network, self.loss = timm.create_model(name, num_classes=3), nn.CrossEntropyLoss()


@pytest.mark.parametrize(("name", "size"), [("vit_tiny_patch16_224", 224), ("efficientvit_m0", 224)])
def test_a_module_without_a_forward_pass_is_treated_and_read(name: str, size: int) -> None:
    model, images = Steps(name).eval(), torch.randn(1, 3, size, size)
    vf.treat_(model, "cb")
    assert vf.applied(model) == vf.applied(model.network) != []
    expected = vf.diagnose(model.network, images).rows
    assert [row["entropy"] for row in vf.diagnose(model, images).rows] == [row["entropy"] for row in expected]
    model.teacher = timm.create_model("efficientvit_m0", num_classes=3)
    if name == "efficientvit_m0":
        with pytest.raises(vf.VitfocusError, match="Steps contains 2 transformers: network, teacher; pass one of them"):
            vf.anatomy(model)


def test_a_state_dict_says_how_to_treat_another_model() -> None:
    model = tiny_timm("cb+tap(branches=2)")
    other = vf.treat_(tiny_timm(""), model.state_dict())
    assert vf.applied(other) == vf.applied(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    with pytest.raises(vf.VitfocusError, match="records no treatment"):
        vf.treat_(other, tiny_timm("").state_dict())


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = tiny_timm("cbs")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(vf.VitfocusError, match="save the model before it is quantised"):
        vf.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_importing_timm_later_connects_it(tmp_path: Path) -> None:
    vf.save(tiny_timm("cb"), tmp_path)
    code = (
        "import sys, vitfocus; assert 'timm' not in sys.modules; import timm; "
        f"assert vitfocus.applied(timm.create_model('local-dir:{tmp_path}', pretrained=True))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


FEATURES = {
    "list": lambda: timm.create_model("pvt_v2_b0", features_only=True, depths=(1, 1, 1, 1)),
    "getter": lambda: timm.create_model("vit_tiny_patch16_224", features_only=True, img_size=64, depth=4),
    "mit_b0": lambda: importlib.import_module("segmentation_models_pytorch").Unet("mit_b0", encoder_weights=None),
    "tu-": lambda: importlib.import_module("segmentation_models_pytorch").Unet("tu-pvt_v2_b0", encoder_weights=None),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_feature_extractors_and_encoders_take_treatments(kind: str) -> None:
    pytest.importorskip("vitfocus.anatomy.structure", reason="models without a record need the structural finder")
    if kind in ("mit_b0", "tu-"):
        pytest.importorskip("segmentation_models_pytorch", reason="the seg extra is not installed")
    model, images = FEATURES[kind]().eval(), torch.randn(2, 3, 64, 64)

    def output() -> torch.Tensor:
        with torch.no_grad():
            made = model.eval()(images)
        return made[-1] if isinstance(made, list) else made

    plain = output()
    vf.treat_(model, "cb+tap+adl(variant=paper,threshold=1.0)")
    assert not torch.allclose(output(), plain)
    if kind in ("mit_b0", "tu-"):  # an encoder that is saved by itself keeps its record
        assert vf.applied(model.encoder) == vf.applied(model)
        assert any(STATE_KEY in name for name in model.encoder.state_dict())
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    model(images)
    assert vf.auxiliary_loss(model) > 0
    vf.untreat_(model)
    assert torch.equal(output(), plain)


def test_a_config_whose_backbone_is_fetched_by_default_is_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from vitfocus.treatments.safe_arguments import transformers_config

    class Fetching(transformers.ViTConfig):
        use_timm_backbone = True

    assert transformers_config(transformers.ViTConfig, {"hidden_size": 24}, "a folder").hidden_size == 24
    with pytest.raises(vf.VitfocusError, match="backbone is fetched"):
        transformers_config(Fetching, {"hidden_size": 24}, "a folder")
