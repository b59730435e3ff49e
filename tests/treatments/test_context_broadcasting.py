"""Context Broadcasting against models rewritten by hand, and its counts and refusals."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
import torchvision
from helpers.tiny import build
from torch import Tensor, nn

import vitfocus as vf

VARIANTS = ("mean", "scaled", "gate", "hybrid")


def by_hand(x: Tensor, variant: str, axes: tuple[int, ...], scale: Tensor | None) -> Tensor:
    mean = x.mean(axes, keepdim=True)
    first = x[:, :1]
    if variant == "mean":
        return (x + mean) / 2
    if variant == "scaled":
        assert scale is not None
        return x + scale * mean
    if variant == "gate":
        return x * (first + 1)
    return x * first + (x + mean) / 2


def draw_scales(model: nn.Module) -> dict[str, Tensor]:
    scales = {name: p for name, p in model.named_parameters() if "context_scale" in name}
    for scale in scales.values():
        nn.init.normal_(scale)
    return scales


def vit_by_hand(model: nn.Module, images: Tensor, variant: str, site: str, position: str, scales: dict) -> Tensor:
    """A timm ViT's forward written out, with the broadcast at the place the paper names."""
    x = model._pos_embed(model.patch_embed(images))
    for index, block in enumerate(model.blocks):

        def cast(tokens: Tensor, where: str, place: str, index: int = index) -> Tensor:
            if index == 0 or place != position or site not in (where, "both"):
                return tokens
            return by_hand(tokens, variant, (1,), scales.get(f"blocks.{index}.context_{where}.context_scale"))

        attn, mlp = block.attn, block.mlp
        y = cast(block.norm1(x), "attention", "front")
        count = y.shape[1]
        q, k, v = attn.qkv(y).reshape(2, count, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = ((q * attn.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        y = cast(y.transpose(1, 2).reshape(2, count, -1), "attention", "mid")
        x = x + cast(attn.proj(y), "attention", "end")
        y = cast(block.norm2(x), "mlp", "front")
        y = cast(mlp.act(mlp.fc1(y)), "mlp", "mid")
        x = x + cast(mlp.fc2(y), "mlp", "end")
    return model.forward_head(model.norm(x))


@pytest.mark.parametrize(
    ("variant", "site", "position"), itertools.product(VARIANTS, ("mlp", "attention", "both"), ("front", "mid", "end"))
)
def test_vit_equals_the_model_written_by_hand(variant: str, site: str, position: str) -> None:
    model, images = build("vit")
    vf.treat_(model, vf.ContextBroadcasting(variant=variant, site=site, position=position, layers="upper"))
    scales = draw_scales(model)
    with torch.no_grad():
        treated = model(images)
        with vf.untreated(model):
            expected = vit_by_hand(model, images, variant, site, position, scales)
    torch.testing.assert_close(treated, expected, atol=1e-6, rtol=1e-5)


def swin_by_hand(model: nn.Module, images: Tensor, variant: str, site: str) -> Tensor:
    x = model.patch_embed(images)
    for stage in model.layers:
        x = stage.downsample(x)
        for block in stage.blocks:
            y = block._attn(block.norm1(x))
            if site == "attention":
                y = by_hand(y, variant, (1, 2), block.context_attention.context_scale)
            x = x + y
            y = block.mlp.fc2(block.mlp.act(block.mlp.fc1(block.norm2(x))))
            if site == "mlp":
                y = by_hand(y, variant, (1, 2), block.context_mlp.context_scale)
            x = x + y
    return model.head(model.norm(x))


def pvt_by_hand(model: nn.Module, images: Tensor, variant: str, site: str) -> Tensor:
    x = model.patch_embed(images)
    for stage in model.stages:
        if stage.downsample is not None:
            x = stage.downsample(x)
        batch, height, width, channels = x.shape
        size = (height, width)
        x = x.reshape(batch, -1, channels)
        for block in stage.blocks:
            for where, branch in (
                ("attention", lambda t, b=block, s=size: b.attn(b.norm1(t), s)),
                ("mlp", lambda t, b=block, s=size: b.mlp(b.norm2(t), s)),
            ):
                with vf.untreated(model):
                    y = branch(x)
                if site == where:
                    y = by_hand(y, variant, (1,), getattr(block, f"context_{where}").context_scale)
                x = x + y
        x = stage.norm(x).reshape(batch, height, width, -1).permute(0, 3, 1, 2)
    return model.forward_head(x)


@pytest.mark.parametrize(
    ("family", "site", "variant"), itertools.product(("swin", "pvt_v2"), ("mlp", "attention"), ("mean", "scaled"))
)
def test_hierarchies_average_over_the_whole_plane(family: str, site: str, variant: str) -> None:
    model, images = build(family)
    vf.treat_(model, vf.ContextBroadcasting(variant=variant, site=site))
    draw_scales(model)
    rewritten = {"swin": swin_by_hand, "pvt_v2": pvt_by_hand}[family]
    with torch.no_grad():
        torch.testing.assert_close(model(images), rewritten(model, images, variant, site), atol=1e-6, rtol=1e-5)


def test_mixer_broadcasts_behind_the_channel_mlp() -> None:
    model, images = build("mixer")
    vf.treat_(model, "cb")
    with torch.no_grad():
        treated = model(images)
        x = model.stem(images)
        for block in model.blocks:
            x = x + block.mlp_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2)
            mlp = block.mlp_channels
            y = mlp.fc2(mlp.act(mlp.fc1(block.norm2(x))))
            x = x + 0.5 * y + 0.5 * y.mean(1, keepdim=True)
        expected = model.forward_head(model.norm(x))
    torch.testing.assert_close(treated, expected, atol=1e-6, rtol=1e-5)


def test_torchvision_vit() -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    vf.treat_(model, "cb")
    with torch.no_grad():
        treated = model(images)
        x = model._process_input(images)
        x = torch.cat([model.class_token.expand(2, -1, -1), x], dim=1) + model.encoder.pos_embedding
        for layer in model.encoder.layers:
            y = layer.ln_1(x)
            x = x + layer.self_attention(y, y, y, need_weights=False)[0]
            y = layer.mlp[3](torch.nn.functional.gelu(layer.mlp[0](layer.ln_2(x))))
            x = x + 0.5 * y + 0.5 * y.mean(1, keepdim=True)
        expected = model.heads(model.encoder.ln(x)[:, 0])
    torch.testing.assert_close(treated, expected, atol=1e-6, rtol=1e-5)


def test_transformers_vit() -> None:
    """The last layer's residual stream, taken apart by hooks and put together by hand."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    torch.manual_seed(0)
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    images = torch.randn(2, 3, 32, 32)
    seen: dict[str, Tensor] = {}
    end = vf.anatomy(model)[-1].ports["mlp.end"].module
    end.register_forward_hook(lambda module, args, output: seen.setdefault("branch", output))
    model.layernorm.register_forward_pre_hook(lambda module, args: seen.__setitem__("stream", args[0]))
    with torch.no_grad():
        model(images)
        branch, residual = seen["branch"], seen["stream"] - seen["branch"]
        expected = model.layernorm(residual + 0.5 * branch + 0.5 * branch.mean(1, keepdim=True))
        treated = vf.treat_(model, "cb(layers=[-1])")(images).last_hidden_state
    torch.testing.assert_close(treated, expected, atol=1e-6, rtol=1e-5)


def test_parameter_counts() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    plain = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in vf.treat_(model, "cb").parameters()) == plain
    vf.untreat_(model)
    assert sum(p.numel() for p in vf.treat_(model, "cbs").parameters()) - plain == 4608


def test_zero_scale_changes_nothing() -> None:
    model, images = build("swin")
    with torch.no_grad():
        before = model(images)
        assert torch.equal(vf.treat_(model, "cbs(site=both)")(images), before)


@pytest.mark.parametrize("family", ["swin", "pvt_v2", "mixer", "vit_gap", "convit"])
@pytest.mark.parametrize("variant", ["gate", "hybrid"])
def test_variants_with_a_class_token_refuse_models_without(family: str, variant: str) -> None:
    model, _ = build(family)
    with pytest.raises(vf.VitfocusError, match="class token"):
        vf.treat_(model, vf.ContextBroadcasting(variant=variant))


def test_image_tokens_leave_the_prefix_alone() -> None:
    model, _ = build("vit_registers")
    vf.treat_(model, "cb(tokens=image)")
    module = model.blocks[0].context_mlp
    tokens = torch.randn(2, 5 + 16, 48)
    out = module(tokens)
    assert torch.equal(out[:, :5], tokens[:, :5])
    torch.testing.assert_close(out[:, 5:], 0.5 * tokens[:, 5:] + 0.5 * tokens[:, 5:].mean(1, keepdim=True))
    with pytest.raises(vf.VitfocusError, match="text"):
        vf.treat_(vf.untreat_(model), "cb(tokens=text)")


@pytest.mark.parametrize("tokens", ["all", "text", "image"])
def test_padding_never_enters_the_mean(tokens: str) -> None:
    """In ViLT a padded question must answer like the same question without padding."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.ViltConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=16,
        max_position_embeddings=12,
        max_image_length=-1,
    )
    torch.manual_seed(0)
    model = transformers.ViltModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    vf.treat_(model, vf.ContextBroadcasting(variant="scaled", tokens=tokens))
    draw_scales(model)
    images = torch.randn(1, 3, 32, 32)
    words = torch.tensor([[5, 7, 9]])
    padded = torch.tensor([[5, 7, 9, 1, 1]])
    with torch.no_grad():
        short = model(input_ids=words, attention_mask=torch.ones_like(words), pixel_values=images).pooler_output
        mask = torch.tensor([[1, 1, 1, 0, 0]])
        long = model(input_ids=padded, attention_mask=mask, pixel_values=images).pooler_output
    torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("upper", [2, 3, 4]),
        ("upper:1", [4]),
        ([0, -1], [0, 4]),
        ("upper:5", [0, 1, 2, 3, 4]),
    ],
)
def test_layers(layers: object, expected: list[int]) -> None:
    model, _ = build("vit", depth=5)
    vf.treat_(model, vf.ContextBroadcasting(layers=layers))  # type: ignore[arg-type]
    assert [i for i, block in enumerate(model.blocks) if hasattr(block, "context_mlp")] == expected


def test_layers_out_of_range_are_refused() -> None:
    model, _ = build("vit")
    with pytest.raises(vf.VitfocusError, match="no treatable block 7"):
        vf.treat_(model, "cb(layers=[7])")
    with pytest.raises(vf.VitfocusError, match="more blocks than the 2"):
        vf.treat_(model, "cb(layers=upper:3)")
    assert not vf.applied(model)
