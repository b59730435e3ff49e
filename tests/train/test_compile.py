"""Compiling block by block: the same run as uncompiled, every block really compiled, evaluation left alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.train_tools import rows, tiny
from torch._dynamo.utils import counters

import vitfocus as vf
from vitfocus.train.compile import compile_blocks
from vitfocus.train.run import train

TREATED = "deit_tiny_patch16_224+cb(layers=upper)+tap(branches=2)+adl(layers=all,threshold=0.5)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's front half, which decides what is compiled and how often; its code generator takes minutes."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = torch._dynamo.config
    with config.patch(
        recompile_limit=config.recompile_limit, accumulated_recompile_limit=config.accumulated_recompile_limit
    ):
        yield


def test_alike_blocks_are_compiled_once_and_others_each() -> None:
    images = torch.randn(2, 3, 16, 16)
    for spec, depth, drop_path, expected in (
        ("deit_tiny_patch16_224", 9, 0.0, 1),
        (TREATED, 3, 0.0, 2),  # with Context Broadcasting, and without
        ("deit_tiny_patch16_224", 9, 0.1, 2),  # without stochastic depth, and with some rate of it
    ):
        torch._dynamo.reset()
        counters.clear()
        size = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": depth, "num_heads": 2}
        model = vf.create_model(spec, **size, drop_path_rate=drop_path)
        names = list(model.state_dict())
        assert compile_blocks(model) == depth and list(model.state_dict()) == names
        model.train()(images).sum().backward()
        assert counters["frames"] == {"total": expected, "ok": expected}  # beyond the usual limit of 8 as well
        assert not counters["graph_break"]


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
    losses = {}
    for how in ("no", "blocks"):
        recipe = tiny(
            f"spec={TREATED}",
            "model.arguments={patch_size=4,embed_dim=24,depth=3,num_heads=2}",
            f"compile={how}",
            "evaluate_every=0",
        )
        results = train(recipe, tmp_path / how)
        assert results["compiled"] == (how == "blocks")
        losses[how] = [(row["loss"], row["adl"]) for row in rows(tmp_path / how)]
        if how == "blocks":  # two kinds of blocks and the augmentation for training, nothing more for the evaluation
            assert counters["frames"]["total"] == counters["frames"]["ok"] == 3
    assert all(adl > 0.1 for _, adl in losses["no"])
    torch.testing.assert_close(torch.tensor(losses["blocks"]), torch.tensor(losses["no"]), rtol=1e-4, atol=1e-4)
    models = [vf.load(tmp_path / how / "model").state_dict() for how in ("no", "blocks")]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-2, atol=1e-3)
