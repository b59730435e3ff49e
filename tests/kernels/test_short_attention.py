"""Attention among few tokens in Triton's interpreter (see test_interpreted.py), and in compiled models."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from helpers.kernel_cases import check_short_attention, compare

from vitfocus.kernels.backends import backend, has_triton
from vitfocus.kernels.short_attention import op as short

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("count", [1, 7, 32, 33, 50, 64, 65, 66, 128])
def test_outputs_and_gradients(count: int, dtype: torch.dtype) -> None:
    check_short_attention(count, 16, dtype)


@pytest.mark.parametrize(("width", "spread"), [(24, 1.5), (64, 1.5), (64, 4.5)])
def test_other_widths_and_saturated_maps(width: int, spread: float) -> None:
    check_short_attention(65, width, spread=spread)


@pytest.mark.parametrize("whole", [True, False])
def test_it_can_be_differentiated_twice(whole: bool) -> None:
    packed = torch.randn(2, 7, 3, 2, 16).permute(2, 0, 3, 1, 4).requires_grad_()
    exact = packed.detach().double().requires_grad_()

    def curvature(mixed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(mixed.square().sum(), tokens, create_graph=True)
        return torch.autograd.grad(first.square().sum(), tokens)[0]

    wanted = curvature((exact[0] @ exact[1].mT * 0.3).softmax(-1) @ exact[2], exact)
    got = curvature(short.short_attention(*packed.unbind(), scale=0.3, whole=packed if whole else None), packed)
    compare("second derivative", got, wanted, 1e-4)


@pytest.mark.parametrize("change", ["", "norm", "mask", "dropout", "long", "wide", "off"])
def test_it_takes_the_place_of_torchs_where_it_can(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In timm's attention: from the projection's output if that arrives unchanged, and not at all under a mask."""
    torch.manual_seed(0)
    width = 144 if change == "wide" else 32
    drop = 0.5 if change == "dropout" else 0.0
    layer = timm.layers.Attention(width, 2, qk_norm=change == "norm", norm_layer=torch.nn.LayerNorm, attn_drop=drop)
    tokens = torch.randn(2, 130 if change == "long" else 33, width, requires_grad=True)
    mask = torch.ones(33, 33, dtype=torch.bool).tril() if change == "mask" else None
    calls, real = [], short.short_attention

    def spy(*args: Any, **keywords: Any) -> torch.Tensor:
        calls.append(keywords["whole"] is not None)
        return real(*args, **keywords)

    monkeypatch.setattr(short, "short_attention", spy)
    if change == "off":
        monkeypatch.setattr(short, "MOST_TOKENS", 0)
    results = []
    for mode in (nullcontext(), short.ShortAttention()):
        torch.manual_seed(1)
        with backend("triton"), mode:
            made = layer(tokens, attn_mask=mask)
        results.append((made, *torch.autograd.grad(made.square().sum(), (tokens, layer.qkv.weight))))
    assert calls == {"": [True], "norm": [False]}.get(change, [])
    for mine, theirs in zip(*results, strict=True):
        compare("as torch's", mine, theirs.double(), 1e-5)
