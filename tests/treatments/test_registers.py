"""Registers, trained and at test time: equal to timm's and to the published algorithm, unseen outside the blocks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import build, shake
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.treatments.spec import parse_treatments

TINY: dict[str, Any] = {"depth": 3, "img_size": 64, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("embedded", [False, True], ids=["no_embed_class", "embedded"])
def test_registers_equal_those_of_timm(embedded: bool, pool: str) -> None:
    torch.manual_seed(0)
    options = TINY | {"no_embed_class": not embedded, "global_pool": pool}
    theirs = timm.create_model("vit_tiny_patch16_224", reg_tokens=3, **options).eval()
    shake(theirs)
    ours = vf.treat_(timm.create_model("vit_tiny_patch16_224", **options).eval(), "registers(count=3)")
    state = theirs.state_dict()
    registers = state.pop("reg_token")
    if embedded:  # where timm's registers have positions of their own, behind the class token's
        registers = registers + state["pos_embed"][:, 1:4]
        state["pos_embed"] = torch.cat((state["pos_embed"][:, :1], state["pos_embed"][:, 4:]), dim=1)
    assert set(ours.load_state_dict(state, strict=False).missing_keys) == {"blocks.0.registers.tokens"}
    ours.blocks[0].registers.tokens.data.copy_(registers)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-4)
    for one, other in zip(ours.forward_intermediates(images)[1], theirs.forward_intermediates(images)[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    readings = [vf.diagnose(model, images).rows for model in (ours, theirs)]
    for row, other in zip(*readings, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {"layer", "name", "attention_kind"}:
            assert row[key] == pytest.approx(other[key], rel=1e-3, abs=1e-4), key
    (ours(images).square().mean()).backward()
    (theirs(images).square().mean()).backward()
    assert theirs.reg_token.grad is not None
    torch.testing.assert_close(ours.blocks[0].registers.tokens.grad, theirs.reg_token.grad, atol=1e-6, rtol=1e-3)


def test_models_with_registers_are_recognised() -> None:
    model, _ = build("vit_registers")
    assert vf.anatomy(model)[0].registers == 4 and vf.anatomy(model)[0].prefix_tokens == 5
    with pytest.raises(vf.VitfocusError, match="has 4 registers already"):
        vf.treat_(model, "registers")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8, num_register_tokens=2
    )
    assert vf.anatomy(transformers.Dinov2WithRegistersModel(config))[0].registers == 2


@pytest.mark.parametrize("order", ["registers+tap+adl(tokens=patch)+cb(tokens=image)", "cb+tap+adl+registers(count=2)"])
def test_treatments_inside_blocks_know_added_tokens(order: str) -> None:
    """In any order, and one by one, the same: TAP pools the grid, ADL and CB leave out what is no patch."""
    together, images = build("vit")
    torch.manual_seed(1)
    vf.treat_(together, order).train()
    one_by_one, _ = build("vit")
    for spec in reversed(order.split("+")):
        vf.treat_(one_by_one, spec)
    one_by_one.train().load_state_dict(together.state_dict(), strict=False)
    for model in (together, one_by_one):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    torch.testing.assert_close(one_by_one(images), together(images))
    torch.testing.assert_close(vf.auxiliary_loss(one_by_one), vf.auxiliary_loss(together))
    assert vf.anatomy(together)[1].prefix_tokens == 1 + vf.anatomy(together)[1].added_tokens
    plain, _ = build("vit")
    with vf.untreated(together):
        assert torch.equal(together.eval()(images), plain(images))
    assert vf.anatomy(vf.untreat_(together))[1].prefix_tokens == 1


@pytest.mark.parametrize("family", ["eva02", "dinov3", "vit_parallel", "cait", "deit_distilled", "vit_gap"])
def test_registers_in_other_families(family: str) -> None:
    model, images = build(family)
    vf.treat_(model, "registers+ttr(neurons=[[0,1]])").train()
    model(images).square().mean().backward()
    host = vf.anatomy(model)[0].host
    assert float(host.registers.tokens.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    "family", ["swin", "pvt_v2", "beit", "vit_res_post", "convit", "naflex", "mixer", "fan", "localvit"]
)
def test_blocks_that_count_their_tokens_refuse_more(family: str) -> None:
    model, _ = build(family)
    for spec in ("registers", "ttr(neurons=[[0,0]])"):
        with pytest.raises(
            vf.VitfocusError, match=r"adds tokens, and the blocks of|has no MLP whose neurons|registers already"
        ):
            vf.treat_(model, spec)


def test_gradient_checkpointing() -> None:
    model, images = build("vit")
    vf.treat_(model.train(), "registers")
    model(images).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for reentrant in (False, True):
        model.zero_grad()

        def run(tokens: Tensor, reentrant: bool = reentrant) -> Tensor:
            for block in model.blocks:
                tokens = checkpoint(block, tokens, use_reentrant=reentrant)
            return tokens

        tokens = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        loss = model.forward_head(model.norm(run(tokens))).square().mean()
        if reentrant:
            with pytest.raises(vf.VitfocusError, match="use_reentrant=False"):
                loss.backward()
            continue
        loss.backward()
        for name, parameter in model.named_parameters():
            if name in expected:
                torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4)


PLANTED = (1, 7)


def planted(seed: int = 0) -> Any:
    """A ViT in which neuron 7 of block 1 fires on a few patches and writes a large vector."""
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    depth, neuron = PLANTED
    with torch.no_grad():
        mlp = model.blocks[depth].mlp
        mlp.fc1.weight[neuron] = 3 * torch.randn(48)
        mlp.fc1.bias[neuron] = -24.0
        mlp.fc2.weight[:, neuron] = 20 * torch.nn.functional.normalize(torch.randn(48), dim=0)
    return model


def published(model: Any, images: Tensor, neurons: list[tuple[int, int]] | None, probe: list[Any]) -> Tensor:
    """A timm ViT's forward pass, image by image, with a test-time register behind the patches, as published."""
    outputs = []
    for image in images:
        x = model._pos_embed(model.patch_embed(image[None]))
        x = torch.cat((x, torch.zeros(1, 1, x.shape[-1])), dim=1) if neurons is not None else x
        seen = []
        for depth, block in enumerate(model.blocks):
            x = x + block.attn(block.norm1(x))
            hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))
            for layer, neuron in neurons or ():
                if layer == depth:
                    hidden[0, -1, neuron] = hidden[0, :, neuron].max()
                    hidden[0, 1:-1, neuron] = 0
            x = x + block.mlp.fc2(hidden)
            seen.append((hidden[0], x[0]))
        probe.append(seen)
        outputs.append(model.head(model.fc_norm(model.norm(x)[:, 0])))
    return torch.cat(outputs)


def test_find_registers_and_move_them_as_published() -> None:
    model = planted()
    images = torch.randn(6, 3, 64, 64)
    with torch.no_grad():
        probe: list[Any] = []
        torch.testing.assert_close(published(model, images, None, probe), model(images))
        # The published search, with a fixed threshold: mean |activation| at outliers of block 2, averaged over images.
        norms = torch.stack([seen[2][1][1:].norm(dim=-1) for seen in probe])
        threshold = float(norms.median() * 3)
        assert 0 < float((norms > threshold).float().mean()) < 0.2, "the planted neuron makes no outliers"
        scores = torch.zeros(3, 192)
        found = 0
        for seen, one in zip(probe, norms, strict=True):
            at = (one > threshold).nonzero()[:, 0] + 1
            if len(at):
                found += 1
                scores += torch.stack([hidden[at].abs().mean(dim=0) for hidden, _ in seen])
        best = (scores / found).flatten().argsort(descending=True)[:5].tolist()
        expected = [(index // 192, index % 192) for index in best]
        record = vf.find_registers(model, images, 5, layer=2, threshold=threshold, batch_size=4)
        assert list(record.neurons) == expected and record.neurons[0] == PLANTED

        automatic = vf.find_registers(model, images, 1)
        assert automatic.neurons == (PLANTED,)

        before = vf.diagnose(model, images)
        want = published(model, images, expected, probe := [])
        vf.treat_(model, record)
        torch.testing.assert_close(model(images), want, atol=1e-5, rtol=1e-4)
        after = vf.diagnose(model, images)
    assert before.rows[2]["high_norm"] > 0.005 and after.rows[2]["high_norm"] == 0
    assert after.inserted == "", "it needs no training"
    assert any("registers" in sentence for sentence in before.findings)


def test_registers_are_kept_in_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = planted()
    images = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        plain = model(images)
        record = vf.find_registers(model, images, 3)
        assert parse_treatments(str(record)) == [record]
        treated = vf.treat_(model, record)(images)
        twin = vf.load(vf.save(model, tmp_path / "model"))
        assert vf.applied(twin) == [record] and torch.equal(twin(images), treated)
        other = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
        vf.load_weights(other, tmp_path / "model" / "model.safetensors", treat=True)
        assert vf.applied(other) == [record] and torch.equal(other(images), treated)
        assert torch.equal(copy.deepcopy(model)(images), treated)
        vf.untreat_(model)
        assert torch.equal(model(images), plain)
    assert main(["bench", str(tmp_path / "model"), "--treat", "cbs", "--mode", "infer", "--rounds", "1", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]


def test_what_is_no_register_is_refused() -> None:
    model = planted()
    for given, said in (
        ({"neurons": ()}, "find_registers"),
        ({"neurons": [(1,)]}, "pairs"),
        ({"neurons": [3]}, "pairs"),
    ):
        with pytest.raises(vf.VitfocusError, match=said):
            vf.TestTimeRegisters(**given)  # type: ignore[arg-type]
    with pytest.raises(vf.VitfocusError, match="each neuron once"):
        vf.TestTimeRegisters([(1, 2), (1, 2)])
    for spec in ("ttr(neurons=[[9,0]])", "ttr(neurons=[[0,5000]])"):
        with pytest.raises(vf.VitfocusError, match="has no neuron"):
            vf.treat_(model, spec)
    smooth = timm.create_model("vit_tiny_patch16_224", **TINY)
    with pytest.raises(vf.VitfocusError, match="nothing to move"):
        vf.find_registers(smooth, torch.randn(2, 3, 64, 64))
    with pytest.raises(vf.VitfocusError, match="nothing to move"):
        vf.find_registers(smooth, [])
    with pytest.raises(vf.VitfocusError, match="no layer 7"):
        vf.find_registers(smooth, torch.randn(2, 3, 64, 64), layer=7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_transformers_covers_patches_and_not_registers(attention: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, attn_implementation=attention, **sizes)
    model = vf.treat_(transformers.ViTForImageClassification(config).eval(), "registers(count=3)")
    (registers,) = (value for name, value in model.named_parameters() if name.endswith("registers.tokens"))
    torch.nn.init.normal_(registers)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        whole = model(images).logits
        traced = torch.export.export(model, (images,), strict=False).module()(images).logits  # has a mask of ones
        torch.testing.assert_close(traced, whole)
        try:
            masked = model(images, attention_mask=torch.tensor([[1.0] * 13 + [0.0] * 4] * 2)).logits
        except TypeError:  # transformers 4 takes no mask
            return
        changed = images.clone()
        changed[:, :, 24:] = torch.randn(2, 3, 8, 32)  # the last row of patches, which is hidden
        hidden = model(changed, attention_mask=torch.tensor([[1.0] * 13 + [0.0] * 4] * 2)).logits
        torch.testing.assert_close(hidden, masked)
        assert not torch.allclose(masked, whole, atol=1e-4)
        registers.neg_()
        assert not torch.allclose(model(images, attention_mask=torch.ones(2, 17)).logits, whole, atol=1e-4)


@pytest.mark.parametrize("spec", ["registers(count=3)", "ttr(neurons=[[0,1]])", "registers+ttr(neurons=[[0,1]])"])
@pytest.mark.parametrize("recorded_before", [False, True])
def test_hidden_states_of_transformers_hold_no_added_tokens(spec: str, recorded_before: bool) -> None:
    """Of any layer, also the input of the first: a backbone with out_indices=[0, ...] makes a feature map of it."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = transformers.Dinov2Backbone(transformers.Dinov2Config(**options, out_indices=[0, 2])).eval()
    shake(model)
    images = torch.randn(2, 3, 32, 32)
    plain = copy.deepcopy(model)(images)
    if recorded_before:  # transformers adds its hooks in the first forward pass
        model(images)
    treated = vf.treat_(model, spec)(images)
    assert torch.equal(treated.feature_maps[0], plain.feature_maps[0])
    assert treated.feature_maps[1].shape == plain.feature_maps[1].shape
    assert not torch.equal(treated.feature_maps[1], plain.feature_maps[1])
    twin = copy.deepcopy(model)
    vf.untreat_(model)
    assert torch.equal(model(images).feature_maps[1], plain.feature_maps[1])
    assert torch.equal(twin(images).feature_maps[1], treated.feature_maps[1]), "a copy has a first block of its own"
