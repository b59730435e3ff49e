"""A reading's manners: it disturbs no training step, and says in words what it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

import vitfocus as vf
from vitfocus.attention.diagnosis import Diagnosis
from vitfocus.core.tables import Table


def test_a_pending_loss_survives_a_reading() -> None:
    model = vf.treat_(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64), "adl(threshold=1.0)").train()
    model(torch.randn(1, 3, 64, 64))
    before = vf.auxiliary_loss(model)
    vf.diagnose(model, torch.randn(1, 3, 64, 64))
    assert torch.equal(vf.auxiliary_loss(model), before) and vf.auxiliary_loss(model).requires_grad


def test_a_layer_asked_for_twice() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    images = torch.randn(2, 3, 64, 64)
    once, twice = vf.diagnose(model, images, layers=[0]), vf.diagnose(model, images, layers=[0, -2])
    assert once.rows == twice.rows
    first, second = vf.attention_maps(model, images, layers=[1, 1])
    assert torch.equal(first, second)


def test_what_cannot_be_read_is_said() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64)
    with pytest.raises(vf.VitfocusError, match="not a number"):
        vf.diagnose(model, torch.full((1, 3, 64, 64), float("nan")))
    for wrong in ([], 1.5, [None]):
        with pytest.raises(vf.VitfocusError, match="layer"):
            vf.attention_maps(model, torch.zeros(1, 3, 64, 64), layers=wrong)
    with pytest.raises(vf.VitfocusError, match="at least 1"):
        vf.diagnose(model, torch.zeros(1, 3, 64, 64), batch_size=-1)
    assert vf.diagnose(model, torch.zeros(1, 3, 64, 64), against="gaussian_noise/2").against == "gaussian_noise/2"


def test_images_are_not_copied() -> None:
    """A batch as the model takes it goes in as it is: a copy would stand beside the model's own memory."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    images, seen = torch.randn(4, 3, 32, 32), []
    model.patch_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    vf.diagnose(model, images, batch_size=2)
    assert seen == [images.data_ptr(), images[2:].data_ptr()]


def test_modes_are_as_they_were() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32).train()
    model.blocks[1].eval()
    modes, during = [module.training for module in model.modules()], []
    handle = model.norm.register_forward_hook(lambda *_: during.extend(m.training for m in model.modules()))
    vf.diagnose(model, torch.randn(1, 3, 32, 32))
    handle.remove()
    assert not any(during) and during
    assert [module.training for module in model.modules()] == modes


def test_images_of_other_channels_and_damaged_files_are_said(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64)
    with pytest.raises(vf.VitfocusError, match="images have 1 channel, but the model takes 3"):
        vf.diagnose(model, torch.zeros(1, 1, 64, 64))
    file = vf.diagnose(model, torch.zeros(1, 3, 64, 64)).save(tmp_path)[0].parent / "diagnosis.json"
    whole = file.read_text()
    for content in (whole[: len(whole) // 2], "[]", "{}"):
        file.write_text(content)
        with pytest.raises(vf.VitfocusError, match=r"diagnosis\.json (cannot be read|was not written by)"):
            Diagnosis.load(tmp_path)


def test_a_narrow_table_does_not_squeeze_what_stands_around_it() -> None:
    title, caption = "a name longer than its table", "A sentence of some length, which needs more room than the table."
    lines = str(Table(title, ["a"], [["1"]], caption)).splitlines()
    assert (lines[0], lines[-1]) == (title, caption)
    mixer = timm.create_model("mixer_s32_224", img_size=64)
    assert "Entropy in nats" not in str(vf.diagnose(mixer, torch.zeros(1, 3, 64, 64)))
