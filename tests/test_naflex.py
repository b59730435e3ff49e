"""Images of several sizes in one batch, as timm's NaFlex ViT takes them: what pads them enters no mean."""

from __future__ import annotations

import pytest
import torch
from tiny import build

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


@pytest.mark.parametrize("spec", ["cb", "cbs(site=both)", "cb(tokens=image)", "se"])
@pytest.mark.parametrize("options", [{}, {"use_key_only_attn_mask": True}, {"class_token": True, "reg_tokens": 2}])
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


def test_pooling_refuses_patches_without_an_image() -> None:
    model, images = build("naflex")
    vf.treat_(model, "tap")
    with torch.no_grad():
        assert model(images).isfinite().all()
        with pytest.raises(vf.VitfocusError, match="without an image"):
            model(padded(list(images)))
