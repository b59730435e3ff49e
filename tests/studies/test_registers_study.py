"""The study of test-time registers, at toy scale: a planted outlier neuron is found, and both variants are measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import timm
import torch
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "studies" / "registers" / "study.py"
spec = importlib.util.spec_from_file_location("registers_study", SCRIPT)
assert spec is not None and spec.loader is not None
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)


def test_plain_and_treated_are_measured_on_the_same_photographs(tmp_path: Path) -> None:
    from vitfocus.robustness.classification import wordnet_ids

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3).eval()
    with torch.no_grad():  # neuron 7 fires on a few patches of noise and writes a long vector
        mlp = model.blocks[0].mlp
        mlp.fc1.weight[7] = 3 * torch.randn(48)
        mlp.fc1.bias[7] = -45.0
        mlp.fc2.weight[:, 7] = 20 * torch.nn.functional.normalize(torch.randn(48), dim=0)
    photos = []
    for number in range(24):
        photos.append(tmp_path / wordnet_ids()[number % 3] / f"{number:02}.png")
        photos[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()).save(photos[-1])
    found = study.measure(model, photos[:12], photos[12:], 1, severities=[1], progress=False)
    assert found["spec"] == "ttr(neurons=[[0,7]])"
    before, after = found["plain"]["readings"]["high_norm"], found["ttr"]["readings"]["high_norm"]
    assert max(before) > 0 and max(after) < max(before)
    assert study.class_numbers(photos[:4]) == [0, 1, 2, 0]
    text = str(study.table({"models": {"tiny": found}, "photographs": 4, "device": "CPU"}))
    assert "tiny plain" in text and "tiny ttr" in text
