"""Images of several sizes in one batch, as timm's NaFlex ViT takes them: what pads them enters no mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf


def patches(image: torch.Tensor, side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(3, H, W) as rows of pixels, channels last, and each one's row and column."""
    _, height, width = image.shape
    cut = image.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 3, 4, 0)
    places = torch.cartesian_prod(torch.arange(height // side), torch.arange(width // side))
    return cut.reshape(len(places), -1), places


def padded(images: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    cut = [patches(image) for image in images]
    longest = max(len(rows) for rows, _ in cut)
    whole = [torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for pair in cut for part in pair]
    valid = torch.tensor([[place < len(rows) for place in range(longest)] for rows, _ in cut])
    return {"patches": torch.stack(whole[::2]), "patch_coord": torch.stack(whole[1::2]), "patch_valid": valid}


OPTIONS = [{}, {"use_key_only_attn_mask": True}, {"class_token": True, "reg_tokens": 2}]
IMAGES = [(3, 64, 96), (3, 48, 32), (3, 32, 48), (3, 64, 64)]


@pytest.mark.parametrize("spec", ["cb", "cbs(site=both)", "cb(tokens=image)", "se"])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_image_comes_out_the_same_alone_and_padded(spec: str, options: dict[str, object]) -> None:
    model, _ = build("naflex", **options)
    vf.treat_(model, spec)
    for name, parameter in model.named_parameters():
        if name.endswith("context_scale"):
            torch.nn.init.constant_(parameter, 0.7)
    images = [torch.randn(3, 64, 96), torch.randn(3, 48, 32)]
    with torch.no_grad():
        together = model(padded(images))
        alone = torch.cat([model(image[None]) for image in images])
        with vf.untreated(model):
            assert not torch.allclose(model(padded(images)), together, atol=1e-4)
    torch.testing.assert_close(together, alone)


def padded_in_front(images: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.flip(1) for name, value in padded(images).items()}


def test_padding_may_come_first() -> None:
    model, _ = build("naflex", reg_tokens=0, pos_embed="none")  # with it, timm takes patches to come first
    vf.treat_(model, "cb+adl(threshold=1.0)").train()
    images = [torch.randn(size) for size in IMAGES]
    behind, losses = model(padded(images)), [vf.auxiliary_loss(model)]
    in_front, losses = model(padded_in_front(images)), [*losses, vf.auxiliary_loss(model)]
    torch.testing.assert_close(behind, in_front)
    torch.testing.assert_close(*losses)


def loss_of(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The diversification loss of a batch, and its gradient."""
    model.zero_grad()
    torch.manual_seed(0)
    model(batch)
    loss = vf.auxiliary_loss(model)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", ["", ",variant=paper,heads=each", ",tokens=patch", ",rows=50"])
@pytest.mark.parametrize("options", OPTIONS)
def test_padding_is_neither_a_row_nor_a_column_of_the_diversification_loss(
    options: dict[str, object], form: str, fused: bool
) -> None:
    model, _ = build("naflex", **options)
    for block in model.blocks:
        block.attn.fused_attn = fused
    vf.treat_(model, f"adl(threshold=1.0{form})").train()
    images = [torch.randn(size) for size in IMAGES]  # two of them have six patches
    alone = [loss_of(model, image[None]) for image in images]
    loss, gradient = loss_of(model, padded(images))
    torch.testing.assert_close(loss, torch.stack([one for one, _ in alone]).mean())
    torch.testing.assert_close(gradient, torch.stack([one for _, one in alone]).mean(0), atol=1e-5, rtol=1e-3)
    # Images of one size among them are one batch, and nothing is padded.
    same = [images[0], torch.randn(IMAGES[0])]
    torch.testing.assert_close(loss_of(model, padded(same))[0], loss_of(model, torch.stack(same))[0])


def test_rows_are_drawn_from_what_is_real() -> None:
    model, _ = build("naflex")
    vf.treat_(model, "adl(threshold=1.0,rows=4)").train()
    batch = padded([torch.randn(size) for size in IMAGES])
    noisy = {
        **batch,
        "patches": batch["patches"] + 9 * torch.randn_like(batch["patches"]) * ~batch["patch_valid"][..., None],
    }
    assert not torch.equal(batch["patches"], noisy["patches"])
    torch.testing.assert_close(loss_of(model, batch), loss_of(model, noisy))


def test_pooling_refuses_patches_without_an_image() -> None:
    model, images = build("naflex")
    vf.treat_(model, "tap")
    with torch.no_grad():
        assert model(images).isfinite().all()
        with pytest.raises(vf.VitfocusError, match="without an image"):
            model(padded(list(images)))
