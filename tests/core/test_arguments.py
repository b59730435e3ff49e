"""Arguments that no call can use: tensors without pixels, and names that are too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.cli import main
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


def test_paths_that_no_file_system_takes_are_told(tmp_path: Path) -> None:
    """Whichever function of the library looks for the file, also with an argument of any type."""
    model = vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    (tmp_path / "loop").symlink_to("loop")
    for path in ("x" * 5000, str(tmp_path / "loop" / "x")):
        for call in (vf.Diagnosis.load, vf.load, vf.open_model, vf.report):
            with pytest.raises(vf.VitfocusError):
                call(path)
        for look in (vf.load_weights, vf.diagnose, vf.attention_maps):
            with pytest.raises(vf.VitfocusError):
                look(model, path)
        with pytest.raises(vf.VitfocusError):
            vf.corrupt(path, "fog")


def test_the_home_of_a_user_who_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    model = vf.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    path = "~nobody-of-that-name/x"
    for call in (vf.diagnose, vf.attention_maps, lambda *both: vf.evaluate(both[0], "clean", both[1])):
        with pytest.raises(VitfocusError, match="~nobody-of-that-name"):
            call(model, path)
    with pytest.raises(VitfocusError, match="~nobody-of-that-name"):
        vf.corrupt(torch.rand(1, 3, 32, 32), "frost", severity=1, frost=path)
    assert main(["reproduce", "cb/table8", "--rows", "1", "--data", path, "--scale", "imagenet"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("vitfocus: ")


def test_values_of_other_types_in_methods_and_options(tmp_path: Path) -> None:
    from vitfocus.attention.diagnosis import Diagnosis
    from vitfocus.robustness.results import Scores

    diagnosis = Diagnosis([{"layer": 0, "name": "blocks.0", "entropy": 4.2}], "vit", images=2, size=(64, 64))
    model = build("vit")[0]
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: diagnosis.save(3), "save: folder is 3; expected"),  # type: ignore[arg-type]
        (lambda: diagnosis.compare(3), "compare: other is 3; expected"),  # type: ignore[arg-type]
        (lambda: Scores("clean", 2, {"vit": {"cells": {}}}).save(None), "save: folder is None; expected"),  # type: ignore[arg-type]
        (lambda: vf.save(model, tmp_path / "a", scores=[3]), r"scores holds 3; expected what vitfocus\.evaluate"),
        (lambda: vf.explore(model, images, limit=0), "limit is 0; expected a whole number of at least 1"),
        (lambda: vf.push(model, "no repository"), "'no repository' is not a valid repository name"),
    ]
    for call, said in cases:
        with pytest.raises(vf.VitfocusError, match=said):
            call()
    assert not any(tmp_path.iterdir())
