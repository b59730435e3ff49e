"""The probe sees the maps that a model makes, however the model lays out heads and windows, fused or not."""

from __future__ import annotations

import pytest
import timm
import torch
from helpers.tiny import build, shake
from torch import nn
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.attention.capture import ObservedForward, observing
from vitfocus.attention.layer_readings import Geometry, LayerReadings, layer_rows
from vitfocus.kernels.attention import Observation
from vitfocus.kernels.backends import backend
from vitfocus.kernels.diversity.op import diversity
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.kernels.diversity.with_attention import attention_with_diversity


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


class Collector:
    """An observer that keeps everything."""

    wants_attention = True

    def __init__(self, seen: list[Observation]) -> None:
        self.seen = seen

    def __call__(self, seen: Observation) -> None:
        self.seen.append(seen)


class SharedKeys(nn.Module):
    """Attention whose heads share one head of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width // heads)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query = self.query(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        key = self.key(tokens)[:, None]
        return F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)


def test_heads_that_share_their_keys() -> None:
    """Every head's map is seen, and tiles and whole maps give the same readings."""
    torch.manual_seed(0)
    module, tokens, seen = SharedKeys(32, 4), torch.randn(2, 9, 32), []
    output = ObservedForward(module, "attention", Collector(seen))(tokens)
    query = module.query(tokens).unflatten(2, (4, 8)).transpose(1, 2)
    expected = (query @ module.key(tokens)[:, None].mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(output, (expected @ module.key(tokens)[:, None]).transpose(1, 2).flatten(2))
    (one,) = seen
    torch.testing.assert_close(one.attention(), expected)
    layers = [LayerReadings(token_attention=True, budget=40), LayerReadings(token_attention=True)]
    square = Geometry(9, 9, query_grid=(3, 3), key_grid=(3, 3))
    layers[0].observe(one, square)
    layers[1].observe(Observation(map=expected.detach()), square)
    rows = layer_rows(layers)
    assert rows[0] == pytest.approx(rows[1], rel=1e-4)
    with backend("chunked"):
        losses = [diversity(one.query, one.key, scale=one.scale), row_similarity(expected)]
    torch.testing.assert_close(*losses)
    for mine, theirs in zip(*(torch.autograd.grad(loss, list(module.parameters())) for loss in losses), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_model_under_autocast_is_read_in_single_precision() -> None:
    """Its maps follow from its half-precision queries and keys, and nothing more is rounded on the way."""
    model, images = build("vit")
    seen: list[Observation] = []
    with torch.autocast("cpu", torch.bfloat16):
        maps = vf.attention_maps(model, images, layers=[0])[0]
        row = vf.diagnose(model, images).rows[0]
        with torch.no_grad(), observing([vf.anatomy(model)[0]], lambda block, one: seen.append(one)):
            model(images)
    (one,) = seen
    assert one.query is not None and one.key is not None and one.query.dtype == torch.bfloat16
    exact = (one.query.double() * one.scale @ one.key.double().mT).softmax(-1)
    torch.testing.assert_close(maps.double(), exact, rtol=1e-5, atol=1e-7)
    assert row["entropy"] == pytest.approx(float(torch.special.entr(exact).sum(-1).mean()), rel=1e-5)


class Projected(nn.Module):
    """Attention of queries, keys and values (3, B, H, N, D), the first of which has a hook."""

    def forward(self, whole: torch.Tensor) -> torch.Tensor:
        query, key, value = whole.unbind()
        query.register_hook(lambda gradient: 2 * gradient)
        query.retain_grad()
        self.query = query
        return F.scaled_dot_product_attention(query, key, value)


def test_hooks_of_queries_see_their_gradient() -> None:
    """Also where the observer computes attention, whose gradient could pass the queries by."""

    class Observer(Collector):
        def attend(self, seen: Observation, value: torch.Tensor, whole: torch.Tensor | None) -> object:
            return attention_with_diversity(seen.query, seen.key, value, scale=seen.scale, whole=whole)

    given, results = torch.randn(3, 2, 2, 5, 16), []
    for observer in (Observer([]), Collector([])):
        module, whole = Projected(), given.clone().requires_grad_()
        ObservedForward(module, "sdpa", observer)(whole).square().sum().backward()
        results.append((whole.grad, module.query.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
