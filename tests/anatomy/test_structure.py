"""Models without a record: what a traced forward pass shows of them, and what can be done with it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import TIMM, build, shake
from torch import nn

import vitfocus as vf
from vitfocus.anatomy.inputs import example_inputs
from vitfocus.anatomy.structure import dissect_structure
from vitfocus.cli.models import Named, every_model, fractions, row_of

#: The shares of attention models that must be dissected.
SHARES = {"timm": 0.95, "transformers": 0.85, "torchvision": 1.0}

#: Families whose records name every place that a trace can prove.
ALIKE = ["vit", "vit_registers", "deit_distilled", "eva02", "swin", "pvt_v2", "twins", "pit"]


@pytest.mark.parametrize("family", ALIKE)
def test_the_structure_is_the_one_in_the_record(family: str) -> None:
    name, options, size = TIMM[family]
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
    record, found = vf.anatomy(model), dissect_structure(model, lambda _: [(torch.empty(1, 3, *size, device="meta"),)])
    assert found.found_by == "structure" and found.confidence == 1.0
    assert [block.name for block in found] == [block.name for block in record]
    for mine, theirs in zip(found, record, strict=True):
        assert mine.attention is theirs.attention and mine.mlp is theirs.mlp and mine.norm is theirs.norm
        assert (mine.prefix_tokens, mine.class_token, mine.width) == (
            theirs.prefix_tokens,
            theirs.class_token,
            theirs.width,
        )
        assert mine.grid(size) == theirs.grid(size)
        for place in ("pool", "mlp.front", "mlp.mid", "mlp.end"):
            one, other = mine.ports[place], theirs.ports[place]
            assert (one.module, one.side, one.layout, one.width) == (
                other.module,
                other.side,
                other.layout,
                other.width,
            ), place


class Encoder(nn.Module):
    """torch's own layers, normalised before or behind attention."""

    def __init__(self, norm_first: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.positions = nn.Parameter(torch.randn(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.encoder, self.batch_first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batch_first
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        if self.batch_first:
            return self.head(self.encoder(tokens).mean(1))
        return self.head(self.encoder(tokens.transpose(0, 1)).mean(0))


def levit() -> nn.Module:
    return timm.create_model("levit_128s", num_classes=5)


def efficientvit() -> nn.Module:
    return timm.create_model("efficientvit_m0", num_classes=5, img_size=64)


@pytest.mark.parametrize("make", [Encoder, levit, efficientvit])
def test_treatments_through_places_that_were_found(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    shake(model)
    images = torch.randn(2, 3, *vf.anatomy(model).build_size)
    keys = list(model.state_dict())
    with torch.no_grad():
        plain = model(images)
    for spec in ("cbs", "cbs(site=attention)", "tap(init=near_identity)", "cb", "tap", "adl"):
        try:
            vf.treat_(model, spec)
        except vf.VitfocusError:
            assert make is Encoder and "tap" not in spec
            continue
        treated = model(images)
        if spec in ("cb", "tap"):
            assert not torch.equal(treated, plain), spec
        else:
            torch.testing.assert_close(treated, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))
        treated.square().mean().backward()
        added = {name: p for name, p in model.named_parameters() if name not in keys}
        assert all(p.grad is not None for p in added.values())
        assert not added or any(bool(p.grad.any()) for p in added.values() if p.grad is not None)
        vf.untreat_(model)
        with torch.no_grad():
            assert torch.equal(model(images), plain) and list(model.state_dict()) == keys, spec


def test_products_with_relative_positions_are_not_products_with_keys() -> None:
    """VitDet adds queries times a table of relative positions to the scores: tokens still attend to each other."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
    config = transformers.VitDetConfig(**sizes, use_relative_position_embeddings=True)
    model = transformers.VitDetModel._from_config(config, attn_implementation="eager").eval()
    shake(model)
    images = torch.randn(2, 3, 64, 48)
    assert [block.attention_kind for block in vf.anatomy(model)] == ["global", "global"]
    with torch.no_grad():
        own = model(images, output_attentions=True).attentions
    for read, theirs in zip(vf.attention_maps(model, images, layers=[0, 1]), own, strict=True):
        torch.testing.assert_close(read, theirs.reshape(read.shape))


class Pooled(nn.Module):
    """The first of the patches attends to all, and no block mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.query, self.key = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        scores = self.query(tokens[:, :1]) @ self.key(tokens).transpose(1, 2)
        return (scores.softmax(-1) @ tokens).mean(1)


@pytest.mark.parametrize("spec", ["registers", "extra", "cb"])
def test_a_model_without_blocks_of_image_tokens_is_refused(spec: str) -> None:
    model = Pooled()
    assert not vf.anatomy(model).trunk
    with pytest.raises(vf.VitfocusError, match="Pooled has none"):
        vf.treat_(model, spec)


@pytest.mark.parametrize("batch_first", [True, False])
def test_maps_of_a_multihead_attention_are_its_own(batch_first: bool) -> None:
    torch.manual_seed(0)
    model, images = Encoder(batch_first=batch_first).eval(), torch.randn(2, 3, 32, 32)
    assert [block.grid() for block in vf.anatomy(model)] == [(4, 4)] * 2
    (read,) = vf.attention_maps(model, images, layers=[0])
    layer = model.encoder.layers[0]
    tokens = layer.norm1(model.patches(images).flatten(2).transpose(1, 2) + model.positions)
    tokens = tokens if batch_first else tokens.transpose(0, 1)
    _, own = layer.self_attn(tokens, tokens, tokens, average_attn_weights=False)
    torch.testing.assert_close(read, own.detach())


class Own(nn.Module):
    """A block with a softmax that nothing uses, as in SAM 2, whose patches may be masked or have tokens around."""

    def __init__(self, tokens: str) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Conv2d(3, 32, 8, 8), tokens
        self.more = nn.Parameter(torch.zeros(1, 3, 32))
        self.norm1, self.norm2, self.attention = nn.LayerNorm(32), nn.LayerNorm(32), nn.Module()
        self.attention.forward = self.attend  # type: ignore[method-assign]
        self.attention.qkv, self.attention.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        (q @ k.mT).softmax(-1)  # of heads
        attended = nn.functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)))
        return self.attention.proj(attended.transpose(1, 2).flatten(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.tokens == "behind":
            x = torch.cat([x, self.more.expand(len(x), -1, -1)], dim=1)
        elif self.tokens == "before":
            x = torch.cat([self.more.expand(len(x), -1, -1), x], dim=1)
        elif self.tokens == "masked":
            kept = torch.rand(x.shape[:2], device=x.device).argsort(1)[:, : x.shape[1] // 4, None]
            x = x.gather(1, kept.expand(-1, -1, 32))
        x = x + self.attention(self.norm1(x))
        return (x + self.mlp(self.norm2(x))).mean(1)


@pytest.mark.parametrize(("tokens", "count"), [("before", 19), ("behind", 19), ("masked", 4)])
def test_a_place_is_offered_only_where_patches_are_known_to_lie(tokens: str, count: int) -> None:
    (block,) = body = vf.anatomy(model := Own(tokens).eval())
    if tokens == "before":
        assert (block.attention_kind, block.grid((32, 32)), block.prefix_tokens) == ("global", (4, 4), 3)
    assert ("pool" in block.ports) == (body.confidence == 1.0) == (tokens == "before") and "mlp.end" in block.ports
    assert vf.attention_maps(model, torch.randn(1, 3, 32, 32))[0].shape == (1, 2, count, count)


def test_what_was_found_is_kept_and_leaves_no_trace() -> None:
    model, images = Encoder().train(), torch.randn(1, 3, 32, 32)
    state, before = torch.random.get_rng_state(), [str(key) for key in model.state_dict()]
    vf.anatomy(model)
    assert torch.equal(state, torch.random.get_rng_state()) and model.training and before == list(model.state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        blocks = vf.anatomy(vf.treat_(other, "cb"))
        assert all(other.get_submodule(block.name) is block.host for block in blocks)
        assert other(images).shape == (1, 5)


def test_the_pass_leaves_no_cached_values() -> None:
    """LeViT keeps its position biases in eval mode, and its `eval` does not discard them."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_sizes": [16, 16, 16], "depths": [1, 1, 1], "num_attention_heads": [1, 1, 1], "key_dim": [8] * 3}
    model = transformers.LevitModel(transformers.LevitConfig(**sizes)).eval()
    vf.anatomy(model)
    torch.manual_seed(0)
    before = model.state_dict()
    state = {key: one + 0.1 * torch.rand_like(one) if one.is_floating_point() else one for key, one in before.items()}
    other = copy.deepcopy(model).train().eval()
    for one in (model, other):
        one.load_state_dict(state)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(model(images)[0], other(images)[0])


def test_refusals_name_the_reason() -> None:
    with pytest.raises(vf.VitfocusError, match=r"no softmax attention; describe it with vitfocus\.register"):
        vf.anatomy(timm.create_model("resnet18"))
    model = timm.create_model("swiftformer_xs").eval()
    assert {block.attention_kind for block in vf.anatomy(model)} == {"linear"}
    with pytest.raises(vf.VitfocusError, match="linear attention, without a softmax"):
        vf.attention_maps(model, torch.rand(1, 3, 64, 64))


def test_tokens_out_of_order_are_not_pooled() -> None:
    """Hiera keeps its tokens window by window, so that neighbours in the sequence are none in the image."""
    with torch.device("meta"):
        model = timm.create_model("hiera_tiny_224").eval()
    body = vf.anatomy(model)
    assert not any("pool" in block.ports for block in body) and all("mlp.end" in block.ports for block in body)
    with pytest.raises(vf.VitfocusError, match="tap needs pool"):
        vf.treat_(model, "tap")


def test_texts_videos_and_packed_patches_are_read() -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    texts = transformers.BertModel(transformers.BertConfig(**small, vocab_size=100)).eval()
    video_config = transformers.VideoMAEConfig(**small, image_size=32, patch_size=8, num_frames=4)
    videos = transformers.VideoMAEModel(video_config).eval()
    for model, inputs, count in (
        (texts, {"input_ids": torch.randint(3, 90, (2, 12))}, 12),
        (videos, torch.randn(2, 4, 3, 32, 32), 2 * 4 * 4),
    ):
        assert vf.attention_maps(model, inputs)[0].shape == (2, 2, count, count)
        rows = vf.diagnose(model, inputs).rows
        assert all(0 < row["entropy"] <= row["entropy_bound"] + 1e-6 for row in rows) and len(rows) == 2


#: One name of each kind of finding: records, structures, linear and channel attention, videos, patches.
SAMPLES = {
    "timm": {"levit_128s", "tiny_vit_5m_224", "coat_lite_tiny", "edgenext_xx_small", "halonet26t", "hiera_tiny_224"},
    "torchvision": {"swin3d_t", "swin_t"},
    "transformers": {"vit_mae", "siglip2_vision_model", "videomae", "gemma4_vision"},
}


def compared(
    library: str, names: Container[str] | None, specs: Sequence[str], most: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows as they are computed today, and what differs from the record; too large a model keeps its old row."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    recorded = json.loads((folder / f"coverage_{library}.json").read_text(encoding="utf-8"))
    before = {row["name"]: row for row in recorded["models"]}
    rows, differing = [], {}
    for one in every_model(library):
        if names is not None and one.name not in names:
            continue
        row, then = row_of(one, specs, most), before.get(one.name)
        if row and then and (then.get("read_as"), row.get("read_as")) == ("numbers", "shapes"):
            row = then
        if row is not None:
            rows.append(row)
        if then is not None and (row is None or any(row[key] != then[key] for key in ("found_by", "reading"))):
            differing[one.name] = row and row["reasons"]
    return rows, differing


@pytest.mark.parametrize("library", SAMPLES)
def test_a_sample_of_names(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    found, differing = compared(library, SAMPLES[library], ["cb"], 8_000_000)
    missing = SAMPLES[library] - {one.name for one in every_model(library)}
    assert missing <= {"siglip2_vision_model", "gemma4_vision"}  # which older versions of transformers lack
    assert len(found) == len(SAMPLES[library] - missing) and not differing
    assert fractions(found)[library]["dissected"] == 1.0, [row["reasons"] for row in found]
    linear = {row["name"] for row in found if not row["reading"]}
    assert linear <= {"coat_lite_tiny", "edgenext_xx_small"}
    refused = {row["name"] for row in found if not row["treatments"]["cb"]}
    assert refused <= {"halonet26t", "swin3d_t"}  # no MLP, and tokens with an axis of time
    assert all(row["treatments"]["cb"] or "mlp.end" in row["reasons"]["cb"] for row in found)


def test_what_cannot_be_built_counts() -> None:
    """A model that its library cannot build is not dissected, unless its code has no attention."""

    def fail() -> nn.Module:
        raise ImportError("natten is missing")

    row = row_of(Named("timm", "x", "x", fail, "timm.models.vision_transformer"))
    assert row is not None and row["found_by"] is None and "natten" in row["reasons"]["anatomy"]
    assert row_of(Named("timm", "x", "x", fail, "timm.models.vgg")) is None
    convnet = Named("timm", "x", "x", lambda: timm.create_model("resnet18"), "timm.models.resnet")
    assert row_of(convnet) is None
    assert fractions([row]) == {"timm": {"models": 1, "dissected": 0.0, "read": 0.0}}


def test_the_recorded_coverage_holds_the_shares() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    for library, share in SHARES.items():
        recorded = json.loads((folder / f"coverage_{library}.json").read_text(encoding="utf-8"))
        assert recorded["fractions"] == fractions(recorded["models"])
        assert recorded["fractions"][library]["dissected"] >= share, library


@pytest.mark.slow
@pytest.mark.parametrize("library", SHARES)
def test_nearly_every_attention_model_is_dissected(library: str) -> None:
    rows, differing = compared(library, None, (), 30_000_000)
    assert not differing
    assert fractions(rows)[library]["dissected"] >= SHARES[library]


def test_inputs_are_guessed_from_what_a_model_states() -> None:
    guesses = [next(iter(one.values())).shape[-2:] for one in example_inputs(Encoder())]
    assert guesses[0] == (32, 32)  # of the positions
    model, _ = build("vit_rect")
    assert next(iter(next(example_inputs(model)).values())).shape == (1, 3, 64, 96)
