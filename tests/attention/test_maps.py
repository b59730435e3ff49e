"""Explicit maps: exactly what was asked for, said before it is stored, and the pictures made of them."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

from vitfocus.attention import maps as maps_module
from vitfocus.attention import plots
from vitfocus.attention.maps import attention_maps, normalise_together, on_grid, rollout
from vitfocus.attention.plots import png
from vitfocus.core.errors import VitfocusError


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=(64, 96)).eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.1)
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def explicit(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    seen = []
    handles = []
    for block in model.blocks:
        block.attn.fused_attn = False
        handles.append(block.attn.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    with torch.no_grad():
        model(images)
    for block, handle in zip(model.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return seen


def test_exactly_what_was_asked_for(model: nn.Module, images: torch.Tensor) -> None:
    whole = explicit(model, images)
    everything = attention_maps(model, images, layers=None)
    assert len(everything) == 3 and [block.name for block in everything.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for mine, theirs in zip(everything, whole, strict=True):
        torch.testing.assert_close(mine, theirs)
    (last,) = attention_maps(model, images)
    torch.testing.assert_close(last, whole[-1])
    two = attention_maps(model, images, layers=["blocks.2", 0], heads=[2, 0], queries=[0, -1, 7], batch_size=1)
    torch.testing.assert_close(two[0], whole[2][:, [2, 0]][:, :, [0, -1, 7]])
    torch.testing.assert_close(two[1], whole[0][:, [2, 0]][:, :, [0, -1, 7]])
    (row,) = attention_maps(model, images, heads=1, queries=slice(1, None, 5))
    torch.testing.assert_close(row, whole[-1][:, 1:2, 1::5])


def test_windows_and_class_attention(images: torch.Tensor) -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2)).eval()
    assert [tuple(m.shape) for m in attention_maps(swin, torch.zeros(2, 3, 56, 56), layers=[0, -1])] == [
        (8, 3, 49, 49),
        (2, 6, 49, 49),
    ]
    cait = timm.create_model("cait_xxs24_224", depth=1, img_size=64).eval()
    assert attention_maps(cait, torch.zeros(1, 3, 64, 64))[0].shape == (1, 4, 1, 17)


def test_misses_are_helped(model: nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(VitfocusError, match="There is no head 3: there are 3, 0 to 2"):
        attention_maps(model, images, heads=3)
    with pytest.raises(VitfocusError, match="There is no query 25"):
        attention_maps(model, images, queries=[25])
    with pytest.raises(VitfocusError, match="heads is 'mean'; expected a whole number or a list"):
        attention_maps(model, images, heads="mean")
    mixer = timm.create_model("mixer_s32_224")
    with pytest.raises(VitfocusError, match=r"blocks\.7 has no token-to-token map, but no attention \(an MLP or"):
        attention_maps(mixer, torch.zeros(1, 3, 224, 224))


def test_large_requests_say_how_much_memory_first(model: nn.Module, images: torch.Tensor, monkeypatch) -> None:
    bytes_each = 4 * 2 * 3 * 25 * 25
    with pytest.raises(VitfocusError, match=r"These maps take 0\.0 MB, more than limit=.*raise `limit`"):
        attention_maps(model, images, layers=None, limit=3 * bytes_each - 1)
    attention_maps(model, images, layers=None, limit=3 * bytes_each)
    with pytest.raises(VitfocusError, match="The maps so far take"):
        attention_maps(model, [images, images], layers=None, limit=4 * bytes_each)
    monkeypatch.setattr(maps_module, "WARN_BYTES", 2 * bytes_each)
    with pytest.warns(UserWarning, match="attention maps take"):
        attention_maps(model, images, layers=None)
    assert not any("forward" in vars(module) for module in model.modules())


def test_rollout_equals_the_product_by_hand() -> None:
    maps = [torch.randn(2, 3, 5, 5).softmax(dim=-1) for _ in range(3)]
    expected = np.eye(5)
    for layer in maps:
        expected = (0.5 * layer[1].mean(dim=0).double().numpy() + 0.5 * np.eye(5)) @ expected
    np.testing.assert_allclose(rollout(maps)[1].numpy(), expected, rtol=1e-5)
    with pytest.raises(VitfocusError, match="square maps over the same tokens"):
        rollout([torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 2)])


def test_two_models_share_one_threshold_and_one_scale() -> None:
    first, second = torch.tensor([[0.6, 0.2], [0.1, 0.1]]), torch.tensor([[0.3, 0.3], [0.3, 0.1]])
    a, b = normalise_together([first, second], threshold=1.0)  # 1/K is 0.25
    torch.testing.assert_close(a, torch.tensor([[1.0, 0], [0, 0]]))
    torch.testing.assert_close(b, torch.tensor([[0.5, 0.5], [0.5, 0]]))
    assert on_grid(torch.arange(7.0), (2, 3), 1).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_pictures_render(model: nn.Module, images: torch.Tensor) -> None:
    both = {"a": model, "b": model}
    drawn = [
        plots.map_matrices(both, {"clean": images[0], "noisy": images[1]}),
        plots.head_maps(model, images[0], layer=0),
        plots.query_overlay(both, images[0], (3, 5)),
        plots.class_overlay(model, images[0]),
        plots.class_overlay(both, (images[0] * 40 + 128).clamp(0, 255).byte(), through=True),
    ]
    assert all(png(figure).startswith(b"\x89PNG") for figure in drawn)
    with pytest.raises(VitfocusError, match=r"There is no patch \(4, 0\): the grid has 4 rows and 6 columns"):
        plots.query_overlay(model, images[0], (4, 0))
    with pytest.raises(VitfocusError, match="one image, but 2 were given"):
        plots.head_maps(model, images)
    pvt = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1))
    with pytest.raises(VitfocusError, match="has no class token"):
        plots.class_overlay(pvt, images[0])
