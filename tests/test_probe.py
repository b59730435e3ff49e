"""The probe sees the maps that a model makes, however the model lays out heads and windows, fused or not."""

from __future__ import annotations

import pytest
import timm
import torch
from tiny import build, shake
from torch import nn

import vitfocus as vf


def differential() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    options = {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model("vit_dwee_patch16_reg1_gap_256", **options).eval()
    shake(model)
    return model, torch.randn(2, 3, 64, 64)


def own_maps(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """What the model's attention dropouts receive, as (B, H, Q, K), with fused attention off."""
    seen: list[torch.Tensor] = []
    handles = []
    blocks = vf.anatomy(model)
    for block in blocks:
        drop = block.attention.attn_drop
        handles.append(drop.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
        block.attention.fused_attn = False
    with torch.no_grad():
        model(images)
    for block, handle in zip(blocks, handles, strict=True):
        block.attention.fused_attn = True
        handle.remove()
    heads = [block.attention.num_heads for block in blocks]
    folded = (one.unflatten(0, (-1, count)) if one.ndim == 3 else one for one, count in zip(seen, heads, strict=True))
    return [one.flatten(0, -4) for one in folded]


@pytest.mark.parametrize("family", ["differential", "sam", "twins", "naflex", "swin_v2_cr"])
@pytest.mark.parametrize("fused", [True, False])
def test_maps_are_the_models_own(family: str, fused: bool) -> None:
    """Differential attention calls twice, SAM folds heads into the batch, Twins' windows are an axis of their own."""
    model, images = differential() if family == "differential" else build(family)
    expected = own_maps(model, images)
    for block in vf.anatomy(model):
        block.attention.fused_attn = fused
    with torch.no_grad():
        plain = model(images)
    maps = vf.attention_maps(model, images, layers=None)
    for mine, theirs in zip(maps, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.sum(-1), torch.ones(mine.shape[:-1]))
    rows = vf.diagnose(model, images).rows
    assert all("distance" in row for row in rows)
    with torch.no_grad():
        assert torch.equal(model(images), plain)
