"""Compiling block by block: the same run as uncompiled, every block really compiled, evaluation left alone."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.compiled_blocks import (
    compile_for_several_batches,
    compile_with_short_attention,
    count_compilations,
    train_tiny,
)
from helpers.processes import start
from helpers.train_tools import rows
from torch.nn import functional as F

import vitfocus as vf
from vitfocus.kernels.backends import has_triton
from vitfocus.train.compile import compile_blocks, compile_outside

#: Compiled once, whatever the blocks: patch embedding, positions, last norm and head.
OUTSIDE = 4
TREATED = "deit_tiny_patch16_224+cb(layers=upper)+tap(branches=2)+adl(layers=all,threshold=0.5)"


@pytest.mark.parametrize(
    ("spec", "depth", "drop_path", "expected"),
    [
        ("deit_tiny_patch16_224", 9, 0.0, 1),  # beyond the usual limit of 8 versions
        (TREATED, 3, 0.0, 2),  # with Context Broadcasting, and without
        ("deit_tiny_patch16_224", 9, 0.1, 2),  # without stochastic depth, and with some rate of it
    ],
    ids=["plain", "treated", "stochastic depth"],
)
def test_equal_blocks_are_compiled_once_and_others_separately(
    spec: str, depth: int, drop_path: float, expected: int
) -> None:
    counted = start(count_compilations, spec, depth, drop_path).results()
    assert counted["frames"] == {"total": expected + OUTSIDE, "ok": expected + OUTSIDE}
    assert counted["blocks"] == depth and not counted["graph_breaks"] and not counted["renamed"]


def test_stochastic_depth_with_its_rate_in_a_tensor_is_timms() -> None:
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    model = vf.create_model("deit_tiny_patch16_224", **size, drop_path_rate=0.4)
    compile_blocks(model)
    path, ones = model.blocks[1].drop_path1, torch.ones(4000, 3, 2)
    assert torch.equal(path.eval()(ones), ones)
    dropped = path.train()(ones)
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))  # whole images
    assert sorted(dropped.unique().tolist()) == pytest.approx([0, 1 / 0.6])
    assert float(dropped.mean()) == pytest.approx(1, abs=0.05)


def test_a_run_compiled_by_blocks_goes_as_an_uncompiled_one(tmp_path: Path) -> None:
    size = "model.arguments={patch_size=4,embed_dim=24,depth=3,num_heads=2}"
    started = {
        how: start(train_tiny, (f"spec={TREATED}", size, f"compile={how}", "evaluate_every=0"), tmp_path / how)
        for how in ("no", "blocks")
    }
    counted = {how: process.results() for how, process in started.items()}
    assert not counted["no"]["compiled"] and counted["blocks"]["compiled"]
    # Two kinds of blocks, the augmentation and the loss for training, nothing more for the evaluation.
    assert counted["blocks"]["frames"] == {"total": 4 + OUTSIDE, "ok": 4 + OUTSIDE}
    losses = {how: [(row["loss"], row["adl"]) for row in rows(tmp_path / how)] for how in started}
    assert all(adl > 0.1 for _, adl in losses["no"])
    torch.testing.assert_close(torch.tensor(losses["blocks"]), torch.tensor(losses["no"]), rtol=1e-4, atol=1e-4)
    models = [vf.load(tmp_path / how / "model").state_dict() for how in ("no", "blocks")]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("spec", ["deit_tiny_patch16_224", "vit_base_patch16_siglip_224"])
def test_what_is_compiled_outside_the_blocks_gives_the_same_gradients(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"img_size": (16, 24), "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = vf.create_model(spec, **size).train()
    plain = copy.deepcopy(model)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compile_outside(model)
    products: list[int] = []
    monkeypatch.setattr(
        F, "pixel_unshuffle", lambda *given, real=F.pixel_unshuffle: (products.append(1), real(*given))[1]
    )
    images, results = torch.randn(3, 3, 16, 24), []
    for one in (model, plain):
        out = one(images)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(one.parameters()))))
    assert products
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    products.clear()
    torch.testing.assert_close(model.eval()(images), plain.eval()(images), rtol=1e-5, atol=1e-6)
    assert not products, "evaluation runs the convolution"
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_compiled_model_can_be_read_as_before() -> None:
    model = vf.create_model("deit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2)
    images = torch.rand(4, 3, 16, 16)
    before = vf.diagnose(model, images).to_dict()
    compile_blocks(model)
    assert vf.diagnose(model, images).to_dict() == before


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize(
    ("treatment", "saved"), [("", 1), ("+gate+registers", 2), ("+qknorm", 0)], ids=["plain", "gate", "qknorm"]
)
def test_compiled_attention_of_few_tokens_runs_our_kernels(treatment: str, saved: int) -> None:
    """Its gradient is not copied where attention gets what the projection made, and results are those of torch's."""
    spec = f"deit_tiny_patch16_224{treatment}"
    ours, torchs = (start(compile_with_short_attention, spec, tokens) for tokens in (128, 0))
    mine, theirs = ours.results(), torchs.results()
    assert mine["launched"] == ["attend_forward"] * 2 + ["attend_backward"] * 2 and not theirs["launched"]
    assert not mine["graph_breaks"] and mine["frames"] == theirs["frames"]
    assert theirs["copies"] - mine["copies"] == saved
    assert mine["error"] < 0.02 and theirs["error"] < 0.02


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize(
    ("size", "kernel"),
    [(32, "attend_backward"), (48, "attention_gradient"), (72, "key_gradient")],
    ids=["65 tokens", "145 tokens", "325 tokens"],
)
def test_a_compiled_model_takes_batches_of_any_size(size: int, kernel: str) -> None:
    """The compiler does not know the size, and the launches must not need it."""
    counted = start(compile_for_several_batches, "deit_tiny_patch16_224+cbs+tap+adl(layers=all)", size).results()
    assert {kernel, "share_mean_kernel", "mix", "score_gradient"} <= set(counted["launched"])
    assert not counted["graph_breaks"] and counted["frames"]["total"] == counted["frames"]["ok"] <= 3


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_compiled_attention_that_is_observed_later_is_torchs() -> None:
    """Our kernels would hide it from the observer."""
    mine = start(compile_with_short_attention, "deit_tiny_patch16_224", 128, "adl(layers=all)").results()
    assert not mine["launched"] and not mine["graph_breaks"] and mine["error"] < 0.02
