"""Attention gates, query-key norms and σReparam: equal to independent computations, and safe in trained weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import build, shake
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import vitfocus as vf

TINY: dict[str, Any] = {"depth": 2, "img_size": 64, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def test_query_key_norm_equals_that_of_timm() -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", qk_norm=True, **TINY).eval()
    shake(theirs)
    ours = vf.treat_(timm.create_model("vit_tiny_patch16_224", **TINY).eval(), "qknorm")
    names = {"attn.q_norm": "query_norm", "attn.k_norm": "key_norm"}
    state = theirs.state_dict()
    for old, new in names.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))
    assert vf.diagnose(ours, images).rows[1]["entropy"] == pytest.approx(vf.diagnose(theirs, images).rows[1]["entropy"])
    with pytest.raises(vf.VitfocusError, match="already"):
        vf.treat_(theirs, "qknorm")


def test_query_key_norm_of_folded_heads() -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, intermediate_size=64
    )
    model = transformers.ViTModel(config).eval()
    query, key = (port.module for port in vf.anatomy(model)[0].query_key)
    seen: dict[str, Any] = {}
    vf.treat_(model, "qknorm")
    tokens = torch.randn(2, 17, 32)
    with torch.no_grad():
        for name, module in (("query_norm", query), ("key_norm", key)):
            norm = getattr(vf.anatomy(model)[0].host, name)
            nn.init.normal_(norm.weight)
            plain = F.linear(tokens, module.weight, module.bias).view(2, 17, 2, 16)
            mean, var = plain.mean(-1, keepdim=True), plain.var(-1, unbiased=False, keepdim=True)
            seen[name] = (plain - mean) / (var + 1e-6).sqrt() * norm.weight + norm.bias
            torch.testing.assert_close(module(tokens), seen[name].flatten(2), atol=1e-5, rtol=1e-4)
    assert model(torch.randn(1, 3, 32, 32)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("per", ["head", "channel"])
def test_gated_block(per: str) -> None:
    """A pre-norm block with gated attention, written out."""
    model, images = build("vit")
    vf.treat_(model, f"gate(per={per})")
    block, tokens = model.blocks[0], torch.randn(2, 17, 48)
    shake(block.attention_gate)
    with torch.no_grad():
        x = block.norm1(tokens)
        q, k, v = block.attn.qkv(x).view(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
        heads = (q @ k.mT / 4).softmax(-1) @ v  # (2, 3, 17, 16)
        gates = 1 / (1 + (-(x @ block.attention_gate.gates.weight.T + block.attention_gate.gates.bias)).exp())
        gates = gates.view(2, 17, 3, -1).transpose(1, 2)  # (2, 3, 17, 1 or 16)
        assert gates.shape[-1] == (1 if per == "head" else 16)
        proj = block.attn.proj  # its hook would gate once more
        attended = tokens + F.linear((heads * gates).transpose(1, 2).reshape(2, 17, 48), proj.weight, proj.bias)
        expected = attended + block.mlp(block.norm2(attended))
        torch.testing.assert_close(block(tokens), expected, atol=1e-5, rtol=1e-4)
    model(images)
    assert block.attention_gate.source.tokens is None, "nothing of a forward pass stays behind"


def test_gates_per_channel_equal_those_of_timm() -> None:
    from timm.layers import Attention

    model, _ = build("vit")
    vf.treat_(model, "gate(per=channel)")
    theirs, block = Attention(48, 3, qkv_bias=True, gated=True), model.blocks[0]
    shake(block.attention_gate)
    theirs.load_state_dict(
        block.attn.state_dict()
        | {f"gate.{name}": value for name, value in block.attention_gate.gates.state_dict().items()}
    )
    tokens = torch.randn(2, 17, 48)
    torch.testing.assert_close(block.attn(block.norm1(tokens)), theirs(block.norm1(tokens)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["vit", "pvt_v2", "eva02", "beit", "vit_parallel"])
@pytest.mark.parametrize("spec", ["gate(init=open)", "gate(per=channel,init=open)", "sigma(init=spectral)"])
def test_preserving_forms(family: str, spec: str, recwarn: pytest.WarningsRecorder) -> None:
    model, images = build(family)
    with torch.no_grad():
        plain = model(images)
        changed = vf.treat_(model, spec)(images)
    torch.testing.assert_close(changed, plain, atol=2e-3 if "gate" in spec else 1e-4, rtol=1e-3)
    assert not [warning for warning in recwarn if "changes what these trained" in str(warning.message)]


@pytest.mark.parametrize(("spec", "better"), [("gate", r"gate\(init=open\)"), ("sigma", r"sigma\(init=spectral\)")])
def test_changing_forms_name_the_better_one(spec: str, better: str) -> None:
    with pytest.warns(vf.VitfocusWarning, match=better):
        vf.treat_(build("vit")[0], spec)
    for other in ("registers", "qknorm"):
        with pytest.warns(vf.VitfocusWarning, match=f"no form of {other} starts as the identity"):
            vf.treat_(build("vit")[0], other)


def test_spectral_norm_equals_that_of_torch() -> None:
    """With γ = 1, each linear layer is torch's own parametrisation, step by step and in its gradients."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    theirs = copy.deepcopy(model)
    vf.treat_(model, "sigma").train()
    for index, block in enumerate(theirs.blocks):
        scales = model.blocks[index].spectral_scales
        for scale, path in zip(scales, ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"), strict=True):
            made = spectral_norm(block.get_submodule(path))
            inner: Any = made.parametrizations.weight[0]  # type: ignore[union-attr, index]
            inner._u.copy_(scale.left)
            inner._v.copy_(scale.right)
    images = torch.randn(2, 3, 64, 64)
    for _ in range(3):
        ours, expected = model(images), theirs.train()(images)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    for module, other in ((model, ours), (theirs, expected)):
        module.zero_grad()
        other.square().mean().backward()
    gradient = theirs.blocks[0].mlp.fc1.parametrizations.weight.original.grad
    torch.testing.assert_close(model.blocks[0].mlp.fc1._parameters["weight"].grad, gradient, atol=1e-6, rtol=1e-3)
    for scale, layer in ((model.blocks[1].spectral_scales[2], model.blocks[1].mlp.fc1),):
        for _ in range(200):
            scale.step(layer._parameters["weight"])
        assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1.0, abs=1e-4)
        scale.gain.data.fill_(2.5)
        assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(2.5, abs=1e-3)


def test_scales_start_anew_with_a_plain_checkpoint() -> None:
    """A checkpoint without scales, loaded behind the surgery, is preserved too."""
    trained, images = build("vit")
    fresh, _ = build("vit", seed=1)
    vf.treat_(fresh, "sigma(init=spectral)")
    vf.load_weights(fresh, copy_to_file(trained))
    torch.testing.assert_close(fresh(images), trained(images), atol=1e-4, rtol=1e-3)
    treated = copy.deepcopy(fresh.state_dict())
    for name in treated:
        if name.endswith(".gain"):
            treated[name] += 1.0
    other, _ = build("vit", seed=2)
    vf.treat_(other, "sigma(init=spectral)").load_state_dict(treated)
    name = "blocks.0.spectral_scales.0.gain"
    assert torch.equal(other.state_dict()[name], treated[name])


def copy_to_file(model: nn.Module) -> str:
    import tempfile

    from safetensors.torch import save_file

    path = f"{tempfile.mkdtemp()}/plain.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return path


def test_scales_may_be_loaded_before_their_weights(tmp_path: Path) -> None:
    """`from_pretrained` reads each weight when it replaces it; in LeViT the scales come before."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    model = transformers.LevitModel(transformers.LevitConfig(image_size=64, **sizes)).eval()
    vf.treat_(model, "sigma").save_pretrained(tmp_path)
    images = torch.randn(2, 3, 64, 64)
    again = transformers.LevitModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(images).pooler_output, model(images).pooler_output)


def test_spectral_scales_reach_attention_in_c() -> None:
    """`nn.MultiheadAttention` does not call its projections; their weights are read scaled all the same."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 1, 2, 32, 64, num_classes=5).eval()
    shake(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(images)
        expected = copy.deepcopy(model)
        layer = expected.encoder.layers[0]
        for module, name in ((layer.self_attention, "in_proj_weight"), (layer.self_attention.out_proj, "weight")):
            weight = getattr(module, name)
            weight /= torch.linalg.matrix_norm(weight, 2)
        with pytest.warns(vf.VitfocusWarning):
            vf.treat_(model, "sigma(site=attention)")
        for scale in model.encoder.layers[0].spectral_scales:
            assert isinstance(scale, nn.Module)
        for one in (model.encoder.layers[0].self_attention, model.encoder.layers[0].self_attention.out_proj):
            for _ in range(300):
                one.__dict__["_vitfocus_spectral_scale"].step(
                    next(p for p in one._parameters.values() if p is not None and p.ndim == 2)
                )
        torch.testing.assert_close(model(images), expected(images), atol=1e-4, rtol=1e-3)
        vf.untreat_(model)
        assert torch.equal(model(images), plain)
