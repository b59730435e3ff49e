"""The Attention Diversification Loss against the released code's outputs, and when it may and may not speak."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.tiny import build
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.attention.capture import observing
from vitfocus.kernels.diversity.reference import row_similarity
from vitfocus.treatments.attention_diversification import RowChoice


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_released_loss_and_gradients(shared: Path, threshold: int) -> None:
    golden = load_file(shared / "golden/attention/adl.safetensors")
    inputs = {name: golden[name].clone().requires_grad_() for name in ("q0", "k0", "q1", "k1")}
    layers = []
    for layer in "01":
        logits = inputs[f"q{layer}"] @ inputs[f"k{layer}"].transpose(-2, -1) * 0.25
        layers.append(row_similarity(logits.softmax(-1), threshold=threshold))
    loss = torch.stack(layers).mean()
    torch.testing.assert_close(loss, golden[f"official.tau{threshold}.loss"][0], atol=1e-5, rtol=1e-5)
    loss.backward()
    for name, tensor in inputs.items():
        expected = golden[f"official.tau{threshold}.d{name}"]
        assert (tensor.grad - expected).norm() <= 1e-5 * max(1e-5, float(expected.norm())) + 1e-7


def equations(attention: np.ndarray, threshold: float) -> float:
    """Equations (1) and (2) of the paper, row by row, for one map (N, N)."""
    count = attention.shape[1]
    rows = np.where(attention >= threshold / count, attention, 0.0)
    mean = rows.mean(0)
    cosines = [
        row @ mean / (np.linalg.norm(row) * np.linalg.norm(mean)) if row.any() and mean.any() else 0.0 for row in rows
    ]
    return float(np.mean(cosines))


@pytest.mark.parametrize("heads", ["mean", "each"])
@pytest.mark.parametrize("threshold", [0.5, 2.0, 5.0])
def test_paper_form_equals_its_equations(heads: str, threshold: float) -> None:
    torch.manual_seed(0)
    maps = (torch.randn(2, 3, 9, 11, dtype=torch.float64) * 2).softmax(-1)
    flat = maps.mean(1) if heads == "mean" else maps.flatten(0, 1)
    expected = np.mean([equations(one.numpy(), threshold) for one in flat])
    got = row_similarity(maps, variant="paper", heads=heads, threshold=threshold)  # type: ignore[arg-type]
    assert got.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_gradcheck(variant: str) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 2, 5, 5, dtype=torch.float64) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: row_similarity(s.softmax(-1), variant=variant, threshold=1.1), logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_empty_rows_give_zero_and_no_nan(variant: str) -> None:
    logits = torch.zeros(1, 1, 4, 4, requires_grad=True)
    loss = row_similarity(logits.softmax(-1), variant=variant, threshold=2.0)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def expected_loss(model: nn.Module, images: Tensor, **options: object) -> Tensor:
    """The loss from explicit maps, computed outside the treatment."""
    maps: list[Tensor] = []
    blocks = [block for block in vf.anatomy(model).trunk if block.mixes_tokens_by_attention]
    with observing(blocks, lambda block, seen: maps.append(seen.attention())):
        model(images)
    return torch.stack([row_similarity(one, **options) for one in maps]).mean()  # type: ignore[arg-type]


FAMILIES = [
    "vit",
    "swin",
    "swin_v2",
    "pvt_v2",
    "beit",
    "eva02",
    "convit",
    "mvit",
    "davit",
    "fan",
    "rvt",
    "vit_parallel",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_auxiliary_loss_is_what_the_maps_say(family: str) -> None:
    model, images = build(family)
    expected = 0.3 * expected_loss(model, images, variant="paper", threshold=1.0)
    vf.treat_(model, "adl(weight=0.3,variant=paper,threshold=1.0)").train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    model(images)
    loss = vf.auxiliary_loss(model)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    loss.backward()
    attention = next(b.attention for b in vf.anatomy(model).trunk if b.mixes_tokens_by_attention)
    grads = [p.grad for p in attention.parameters() if p.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads) and any(grad.abs().sum() > 0 for grad in grads)


def test_torchvision_gradient_reaches_the_projection() -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, 32, 32)
    expected = expected_loss(model, images, variant="paper", threshold=1.0)
    vf.treat_(model, "adl(variant=paper,threshold=1.0)")
    model(images)
    loss = vf.auxiliary_loss(model)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    grad = model.encoder.layers[-1].self_attention.in_proj_weight.grad
    assert grad[:32].abs().sum() > 0 and grad[32:].abs().sum() == 0


def test_never_stale() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    assert vf.auxiliary_loss(model).item() == 0
    model(images)
    first = vf.auxiliary_loss(model)
    model(images * 2)
    second = vf.auxiliary_loss(model)
    model(images)
    torch.testing.assert_close(vf.auxiliary_loss(model), first)
    assert not torch.equal(first, second)
    model.eval()(images)
    assert vf.auxiliary_loss(model).item() == 0
    assert isinstance(vf.auxiliary_loss(vf.untreat_(model)), Tensor)


def test_batch_of_one_is_not_zero() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(threshold=1.0)").train()
    model(images[:1])
    assert vf.auxiliary_loss(model) > 0.1


def test_gradient_accumulation_adds_up() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    weight = model.blocks[0].attn.qkv.weight
    parts = []
    for image in images.split(1):
        model.zero_grad()
        model(image)
        vf.auxiliary_loss(model).backward()
        parts.append(weight.grad.clone())
    model.zero_grad()
    for image in images.split(1):
        model(image)
        vf.auxiliary_loss(model).backward()
    torch.testing.assert_close(weight.grad, parts[0] + parts[1])


def test_rows_estimate_the_whole() -> None:
    torch.manual_seed(0)
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0,rows=4)").train()
    estimates = []
    for _ in range(200):
        model(images)
        estimates.append(vf.auxiliary_loss(model).item())
    whole = expected_loss(vf.untreat_(model), images, variant="paper", threshold=1.0).item()
    assert np.std(estimates) > 0 and abs(np.mean(estimates) - whole) < 0.15
    vf.treat_(model, "adl(variant=paper,threshold=1.0,rows=17)")
    model(images)
    assert vf.auxiliary_loss(model).item() == pytest.approx(whole, rel=1e-5)


def test_patch_tokens_drop_rows_and_columns() -> None:
    model, images = build("deit_distilled")
    maps: list[Tensor] = []
    with observing(vf.anatomy(model).blocks, lambda block, seen: maps.append(seen.attention()[:, :, 2:, 2:])):
        model(images)
    expected = torch.stack([row_similarity(one, variant="paper", threshold=1.0) for one in maps]).mean()
    vf.treat_(model, "adl(tokens=patch,variant=paper,threshold=1.0)").train()
    model(images)
    torch.testing.assert_close(vf.auxiliary_loss(model), expected)


def test_outputs_do_not_change() -> None:
    for family in ("vit", "swin", "convit"):
        model, images = build(family)
        model.train()
        torch.manual_seed(1)
        before = model(images)
        torch.manual_seed(1)
        assert torch.equal(vf.treat_(model, "adl")(images), before)


def test_reading_a_model_in_training_mode_sees_its_attention_and_keeps_the_loss() -> None:
    """The loss would compute attention too, which looks like the model's."""
    model, images = build("vit")
    vf.treat_(model, "adl(threshold=1.0)").train()
    model(images)
    loss, maps = vf.auxiliary_loss(model), []
    with observing(vf.anatomy(model).blocks, lambda _, seen: maps.append(seen.attention())):
        model(images * 2)
    assert torch.equal(vf.auxiliary_loss(model), loss)
    expected = vf.attention_maps(model, images * 2, layers=[0, 1])
    for one, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other))


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)+tap").train()
    grads = []
    for enable in (False, True):
        twin = copy.deepcopy(model)
        twin.set_grad_checkpointing(enable)
        (twin(images).square().mean() + vf.auxiliary_loss(twin)).backward()
        grads.append(twin.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_checkpointed_and_compiled_as_one_graph_it_has_the_same_gradient() -> None:
    """With the setting that docs/treating.md names: else torch refuses a checkpointed block that keeps a loss."""
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    model.set_grad_checkpointing(True)

    def loss() -> torch.Tensor:
        return model(images).square().mean() + vf.auxiliary_loss(model)

    expected = torch.autograd.grad(loss(), list(model.parameters()))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(), list(model.parameters()))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_reentrant_checkpointing_is_refused_rather_than_silent() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    images.requires_grad_()
    out = torch.utils.checkpoint.checkpoint(
        model.blocks[0], model._pos_embed(model.patch_embed(images)), use_reentrant=True
    )
    with pytest.raises(vf.VitfocusError, match="use_reentrant=False"):
        out.sum().backward()


def test_a_checkpoint_around_the_whole_model_keeps_the_loss_or_refuses() -> None:
    model, images = build("vit")
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    images.requires_grad_()
    model(images)
    loss = vf.auxiliary_loss(model)
    weight = model.blocks[0].attn.qkv.weight
    (expected,) = torch.autograd.grad(loss, weight)
    out = torch.utils.checkpoint.checkpoint(model, images, use_reentrant=False)
    (0 * out.sum() + vf.auxiliary_loss(model)).backward()
    torch.testing.assert_close(weight.grad, expected)
    torch.testing.assert_close(vf.auxiliary_loss(model), loss)
    out = torch.utils.checkpoint.checkpoint(model, images, use_reentrant=True)
    with pytest.raises(vf.VitfocusError, match="use_reentrant=False"):
        (out.sum() + vf.auxiliary_loss(model)).backward()


@pytest.mark.parametrize("family", ["mixer", "xcit"])
def test_refused_without_token_attention(family: str) -> None:
    model, _ = build(family)
    with pytest.raises(vf.VitfocusError, match="token attention"):
        vf.treat_(model, "adl")


def test_uniform_rows_cost_nothing_below_the_threshold() -> None:
    """FACTS: where no column receives more than τ/N the official loss is exactly 0."""
    maps = F.normalize(torch.ones(1, 1, 6, 6), p=1, dim=-1)
    assert row_similarity(maps, variant="official").item() == 0


def test_two_losses_keep_their_own_weights() -> None:
    model, images = build("vit")
    parts = []
    for layer in (0, 1):
        vf.treat_(model, f"adl(layers=[{layer}],variant=paper,threshold=1.0)").train()
        model(images)
        parts.append(vf.auxiliary_loss(model).item())
        vf.untreat_(model)
    vf.treat_(model, *(f"adl(layers=[{i}],variant=paper,threshold=1.0,weight={w})" for i, w in ((0, 1.0), (1, 100.0))))
    model(images)
    assert vf.auxiliary_loss(model).item() == pytest.approx(parts[0] + 100 * parts[1], rel=1e-5)


def test_rows_drawn_once_leave_checkpointed_blocks_their_random_numbers() -> None:
    """A block computed a second time draws what it drew the first time, stochastic depth behind the rows included."""
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, drop_path_rate=0.5, proj_drop_rate=0.2, **options)
    vf.treat_(model.train(), "adl(variant=paper,threshold=1.0,rows=5)")
    images, gradients = torch.randn(8, 3, 32, 32), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        loss = model(images).square().mean() + vf.auxiliary_loss(model)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_all_layers_of_a_pass_compare_the_same_rows_and_the_next_pass_others() -> None:
    choice = RowChoice()
    first = choice.of(1000, 5, 0, torch.device("cpu"), asker=0)
    assert choice.of(1000, 5, 0, torch.device("cpu"), asker=1) is first
    assert choice.of(500, 5, 0, torch.device("cpu"), asker=1).max() < 500
    choice.reset()
    assert not torch.equal(choice.of(1000, 5, 0, torch.device("cpu"), asker=0), first)


def test_attention_that_cannot_be_seen_is_an_error() -> None:
    """A kernel such as flash attention hides the map: the loss is refused, and a diagnosis reads it through sdpa."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

    def opaque(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> tuple[Any, None]:
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).exp()
        return (weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("opaque", opaque)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    images = torch.randn(2, 3, 32, 32)
    seen = vf.diagnose(model, images, normalised=True).rows[0]["entropy"]
    vf.treat_(model, "adl(variant=paper,threshold=1.0)").train()
    model(images)
    assert vf.auxiliary_loss(model) > 0
    model.config._attn_implementation = "opaque"
    with pytest.raises(vf.VitfocusError, match="which runs opaque: load the model with attn_implementation='sdpa'"):
        model(images)
    with pytest.raises(vf.VitfocusError, match="saw no attention in the last forward"):
        vf.auxiliary_loss(model)
    assert vf.diagnose(model, images, normalised=True).rows[0]["entropy"] == pytest.approx(seen)
    assert model.config._attn_implementation == "opaque"
    model.eval()(images)
    assert vf.auxiliary_loss(model) == 0
