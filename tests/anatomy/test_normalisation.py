"""What a model wants its pixels to be, where its family's usual values are not the ones it was trained with."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import vitfocus as vf
from vitfocus.anatomy import input_spec, remember_normalising
from vitfocus.attention.batches import corrupted, normalised
from vitfocus.data.image_files import Normalise
from vitfocus.treatments.save_load import open_model

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


def folder_of(tmp_path: Path, **beside: object) -> Path:
    """A transformers checkpoint, with files of settings beside it."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    for name, content in beside.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


SETTINGS = {"image_mean": MEAN, "image_std": STD}


@pytest.mark.parametrize(
    ("beside", "mean", "std"),
    [
        ({}, (0.5,) * 3, (0.5,) * 3),
        ({"preprocessor_config": SETTINGS}, MEAN, STD),
        ({"processor_config": {"image_processor": SETTINGS}}, MEAN, STD),
        ({"preprocessor_config": {**SETTINGS, "do_normalize": False}}, (0.0,) * 3, (1.0,) * 3),
        ({"preprocessor_config": {"image_mean": "damaged"}}, (0.5,) * 3, (0.5,) * 3),
        ({"preprocessor_config": [1]}, (0.5,) * 3, (0.5,) * 3),
    ],
)
def test_a_checkpoints_own_image_processor_knows_better(tmp_path: Path, beside, mean, std) -> None:
    model = open_model(str(folder_of(tmp_path, **beside)))
    wanted = input_spec(model)
    assert (wanted.mean, wanted.std, vf.anatomy(model).mean) == (mean, std, mean)


def test_bytes_are_measured_as_the_processor_would_give_them(tmp_path: Path) -> None:
    model = open_model(str(folder_of(tmp_path, preprocessor_config=SETTINGS)))
    nn.init.normal_(model.vit.embeddings.patch_embeddings.projection.weight)
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    by_hand = (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    read = [vf.diagnose(model, images).rows[0] for images in (pixels, by_hand)]
    assert read[0]["entropy"] == pytest.approx(read[1]["entropy"], abs=1e-6)
    scores = vf.evaluate(model, "clean", [(pixels, torch.tensor([0, 1, 1]))], progress=False)
    right = model(by_hand).logits.argmax(1) == torch.tensor([0, 1, 1])
    assert scores["top1"] == pytest.approx(100 * float(right.float().mean()))


def test_a_note_is_told_by_copies_and_by_models_without_an_anatomy() -> None:
    for name, options in (("vit_tiny_patch16_224", {"depth": 1}), ("resnet18", {})):
        model = timm.create_model(name, **options)
        remember_normalising(model, MEAN, STD)
        assert input_spec(copy.deepcopy(model))[:2] == (MEAN, STD)


def test_a_model_of_one_channel() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=1, img_size=32, patch_size=8, embed_dim=24, in_chans=1, num_classes=4
    ).eval()
    body = vf.anatomy(model)
    assert (body.mean, body.std) == ((0.5,), (0.5,))
    colour = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    luma = (colour.float() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(normalised(colour, body), luma / 255 * 2 - 1, atol=0.01, rtol=0)
    grey = colour[:, :1]
    for pixels in (colour, grey, normalised(grey, body)):
        assert vf.diagnose(model, pixels, against="brightness/2").rows[0]["stability"] > 0.5
    # Brightness treats all channels of a grey picture alike, and so is known without the detour.
    brighter = ((grey / 255 + 0.2).clamp(0, 1) - 0.5) / 0.5
    torch.testing.assert_close(corrupted(grey, body, "brightness/2", 0, 0), brighter, atol=0.02, rtol=0)
    labels = torch.tensor([0, 1, 2])
    assert vf.evaluate(model, "clean", [(grey, labels)], progress=False).images == 3
    luma, colour = luma / 255, colour / 255
    seen = [vf.evaluate(model, "clean", (images, labels), progress=False) for images in (luma, colour)]
    first, second = (torch.tensor(next(iter(scores.samples["clean"].values()))["confidence"]) for scores in seen)
    torch.testing.assert_close(first, second, atol=1e-3, rtol=0)
    assert vf.evaluate(model, "fgsm", (colour, labels), progress=False).images == 3
    with pytest.raises(vf.VitfocusError, match=r"The images have 2 channels, but vit_tiny_patch16_224 takes 1\."):
        vf.evaluate(model, "clean", [(colour[:, :2], labels)], progress=False)


def test_what_is_no_model_is_said() -> None:
    for given, named in (("deit_tiny_patch16_224", "'deit_tiny_patch16_224'"), (None, "None")):
        with pytest.raises(vf.VitfocusError, match=rf"model is {named}; expected a torch\.Module"):
            vf.anatomy(given)


def test_a_detector_may_stand_on_what_has_no_anatomy() -> None:
    seen = input_spec(timm.create_model("resnet18"))
    wanted = Normalise(seen.mean, seen.std, torch.device("cpu"))
    white = wanted(torch.full((3, 2, 2), 255, dtype=torch.uint8))
    torch.testing.assert_close(white[:, 0, 0], (1 - torch.tensor([0.485, 0.456, 0.406])) / wanted.std.flatten() * 255)
