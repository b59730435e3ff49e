"""Uniform heads, extra blocks and squeeze-and-excitation: shapes, counts and arithmetic of the papers' baselines."""

from __future__ import annotations

import pytest
import timm
import torch
from helpers.tiny import build

import vitfocus as vf


def millions(name: str, spec: str, **options: object) -> float:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    return sum(p.numel() for p in vf.treat_(model, spec).parameters()) / 1e6


def test_table_1_parameter_counts() -> None:
    """Rows A, B and C of CB's Table 1: 21M, 22M and 29M beside ViT-S's 22M."""
    assert int(millions("deit_small_patch16_224", "uniform(mode=replace)")) == 21
    assert round(millions("deit_small_patch16_224", "uniform(mode=replace_matched)")) == 22
    assert millions("deit_small_patch16_224", "uniform(mode=append)") == pytest.approx(29.14, abs=0.005)


def test_replaced_head_averages_values() -> None:
    model, images = build("vit")
    attention = model.blocks[0].attn
    tokens = torch.randn(2, 17, 48)
    with torch.no_grad():
        q, k, v = attention.qkv(tokens).reshape(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-2, -1) * attention.scale).softmax(-1) @ v
        mixed[:, 2] = v[:, 2].mean(1, keepdim=True)
        expected = attention.proj(mixed.transpose(1, 2).reshape(2, 17, 48))
        vf.treat_(model, "uniform")
        torch.testing.assert_close(model.blocks[0].attn(tokens), expected, atol=1e-6, rtol=1e-5)
        assert model(images).shape == (2, 5)


def test_appended_half_averages_values() -> None:
    model, _ = build("vit")
    tokens = torch.randn(2, 17, 48)
    with torch.no_grad():
        original = model.blocks[0].attn(tokens)
        vf.treat_(model, "uniform(mode=append)")
        attention = model.blocks[0].attn
        values = attention.qkv(tokens)[..., 4 * 48 + 48 :].mean(1, keepdim=True)
        added = values @ attention.proj.weight[:, 48:].T
        torch.testing.assert_close(attention(tokens), original + added, atol=1e-5, rtol=1e-4)


def test_uniform_head_refuses_other_attention() -> None:
    for family in ("swin", "eva02", "beit"):
        with pytest.raises(vf.VitfocusError, match="plain ViT attention"):
            vf.treat_(build(family)[0], "uniform")
    with pytest.raises(vf.VitfocusError, match="two heads"):
        vf.treat_(build("vit", num_heads=1)[0], "uniform")


def test_untreated_uniform_head_follows_the_model_to_its_precision() -> None:
    model, images = build("vit")
    vf.treat_(model, "uniform").double()
    vf.untreat_(model)
    assert model(images.double()).dtype == torch.float64


def test_extra_blocks_cost_nearly_the_same() -> None:
    """Figure 3: one more attention or one more MLP behind eight layers, at nearly equal cost."""
    plain = millions("vit_small_patch16_224", "cb", depth=8)
    attention = millions("vit_small_patch16_224", "extra(kind=attention)", depth=8) - plain
    mlp = millions("vit_small_patch16_224", "extra(kind=mlp)", depth=8) - plain
    assert attention == pytest.approx(4 * 0.384**2, rel=0.01) and mlp == pytest.approx(attention, rel=0.01)


def test_extra_block_sits_behind_the_last() -> None:
    model, images = build("vit")
    with torch.no_grad():
        tokens = model.blocks(model._pos_embed(model.patch_embed(images)))
        vf.treat_(model, "extra(kind=mlp)")
        half = model.blocks[-1].extra
        expected = model.forward_head(model.norm(tokens + half.layer(half.norm(tokens))))
        torch.testing.assert_close(model(images), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["tnt_s_patch16_224", "tiny_vit_5m_224"])
def test_extra_block_needs_the_tokens_at_the_end_of_the_block(name: str) -> None:
    """TNT's blocks return pixels before patches, and those of TinyViT a map of channels."""
    model = timm.create_model(name)
    with pytest.raises(vf.VitfocusError, match="extra"):
        vf.treat_(model, "extra")
    assert not vf.applied(model)


@pytest.mark.parametrize("run_before", [False, True])
def test_extra_block_reaches_the_feature_maps_of_a_backbone(run_before: bool) -> None:
    """transformers records hidden states by hooks, which it adds in the first forward pass."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 42, "patch_size": 14}
    backbone = transformers.AutoBackbone.from_config(transformers.Dinov2Config(**sizes, out_indices=[2])).train()
    images = torch.randn(2, 3, 42, 42)
    if run_before:
        backbone(images)
    vf.treat_(backbone, "extra")
    backbone(images).feature_maps[-1].square().sum().backward()
    assert all(p.grad is not None for p in backbone.encoder.layer[-1].extra.parameters())


def test_squeeze_excitation() -> None:
    model, images = build("swin")
    vf.treat_(model, "se(reduction=2)")
    block = model.layers[0].blocks[0]
    gate = block.squeeze_excitation
    tokens = torch.randn(2, 196, 24)
    with torch.no_grad():
        expected = tokens * torch.sigmoid(gate.expand(torch.relu(gate.squeeze(tokens.mean(1, keepdim=True)))))
        torch.testing.assert_close(gate(tokens), expected)
        assert gate.squeeze.out_features == 12 and model(images).isfinite().all()
