"""Arguments that no call can use: tensors without pixels, and names that are too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.train.recipe import load_recipe


@pytest.mark.parametrize("kind", ["nested", "mkldnn", "float8_e4m3fn", "5D"])
def test_tensors_that_hold_no_images_in_every_verb(kind: str) -> None:
    image = torch.rand(1, 3, 16, 16)
    odd = {"nested": torch.nested.nested_tensor([image[0]]), "mkldnn": image.to_mkldnn(), "5D": image[None]}
    images = odd[kind] if kind in odd else image.to(getattr(torch, kind))
    model = vf.create_model("vit_tiny_patch16_224", depth=1, img_size=16, patch_size=8).eval()
    options: dict[str, Any] = {"device": "cpu", "workers": 0, "progress": False}
    for call in (
        lambda: vf.diagnose(model, images),
        lambda: vf.attention_maps(model, images),
        lambda: vf.corrupt(images, "fog"),
        lambda: vf.evaluate(model, "clean", (images, torch.tensor([0])), **options),
    ):
        with pytest.raises(VitfocusError, match=kind if kind != "5D" else r"\(1, 1, 3, 16, 16\)|images|Tensor"):
            call()
    if kind in ("nested", "mkldnn"):
        with pytest.raises(VitfocusError, match=f"labels is a {kind} tensor"):
            vf.evaluate(model, "clean", (image, images), **options)


@pytest.mark.parametrize("name", ["x" * 5000, "vit_tiny_patch16_224+" * 500, "transformers:" + "x" * 5000])
def test_names_that_are_too_long_for_a_file(name: str) -> None:
    with pytest.raises(VitfocusError):
        vf.open_model(name)
    with pytest.raises(VitfocusError):
        load_recipe("shapes", [f"spec={name}", f"teacher={name}", "weights=x"])
