"""Every model name timm registers for the covered families: dissected, treated, checked against its own shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch
from tiny import build
from torch import nn

import vitfocus as vf
import vitfocus.models
from vitfocus.attention.probe import observing

#: timm's modules, and options that make their models shallow without changing what a block is.
MODULES: dict[str, dict[str, Any]] = {
    "vision_transformer": {"depth": 2},
    "vision_transformer_hybrid": {"depth": 2},
    "vision_transformer_relpos": {"depth": 2},
    "deit": {"depth": 2},
    "beit": {"depth": 2},
    "eva": {"depth": 2},
    "swin_transformer": {"depths": (2, 2)},
    "swin_transformer_v2": {"depths": (2, 2)},
    "pit": {},
    "pvt_v2": {"depths": (1, 1, 1, 1)},
    "mlp_mixer": {},
    "convit": {},
    "cait": {"depth": 2},
    "xcit": {"depth": 2},
    "mvitv2": {},
    "davit": {},
    "maxxvit": {},
    "volo": {},
    "fan": {},
    "rvt": {},
    "pvt": {},
    "localvit": {},
}


def create(name: str, options: dict[str, Any]) -> nn.Module:
    """The model, shallow where its family lets itself be made so."""
    try:
        return timm.create_model(name, **options)
    except (AssertionError, TypeError, IndexError):
        return timm.create_model(name)


def examine(name: str, **options: Any) -> None:
    """Dissect a model without memory, compare its records with what a forward pass shows, treat it and restore it."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = create(name, options).eval()
        seen = vf.anatomy(model)
        assert [block.depth for block in seen] == list(range(len(seen)))
        for block in seen:
            assert model.get_submodule(block.name) is not None
            assert block.width > 0 and block.attention_kind and min(block.grid()) > 0
        shapes: dict[str, tuple[int, ...]] = {}
        with torch.no_grad(), observing(seen.blocks, lambda block, one: shapes.update({block.name: one.shape})):
            model(torch.empty(1, 3, *seen.build_size))
        for block in seen:
            if block.mixes_tokens_by_attention:
                counts = tuple(rows * columns + block.prefix_tokens for rows, columns in block.attention_grids())
                assert shapes[block.name][2:] == counts, block
        keys = list(model.state_dict())
        taken = 0
        for spec in ("cb", "cbs(site=attention)", "tap", "adl"):
            try:
                vf.treat_(model, spec)
            except vf.VitfocusError:
                continue
            taken += 1
            if spec != "adl" and len(seen) < 20:
                model(torch.empty(1, 3, *seen.build_size))
            vf.untreat_(model)
        assert taken and list(model.state_dict()) == keys


@pytest.mark.parametrize("module", MODULES)
def test_every_registered_name(module: str) -> None:
    names = timm.list_models(module=module)
    assert names
    for name in names:
        try:
            examine(name, **MODULES[module])
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_registered_name_at_full_depth(module: str) -> None:
    for name in timm.list_models(module=module):
        examine(name)


def test_the_record_of_a_vit() -> None:
    model, _ = build("deit_distilled")
    seen = vf.anatomy(model)
    block = seen[1]
    assert (block.name, block.depth, block.stage, block.width) == ("blocks.1", 1, 0, 48)
    assert (block.prefix_tokens, block.layout, block.grid(), block.grid((32, 80))) == (2, "BNC", (4, 4), (2, 5))
    assert block.mlp is model.blocks[1].mlp and block.attention is model.blocks[1].attn
    assert block.norm is model.blocks[1].norm1
    assert seen.mean == (0.485, 0.456, 0.406) and len(seen) == len(list(seen)) == 2


def test_stages_and_rectangles() -> None:
    seen = vf.anatomy(build("pvt_v2")[0])
    assert [block.stage for block in seen] == [0, 1, 2, 3]
    assert [block.grid((96, 160)) for block in seen] == [(24, 40), (12, 20), (6, 10), (3, 5)]
    assert [block.grid(100, 70) for block in seen] == [(25, 18), (13, 9), (7, 5), (4, 3)]
    assert seen[0].attention_grids((96, 160)) == ((24, 40), (3, 5))
    swin = vf.anatomy(build("swin")[0])
    assert swin[0].window == (7, 7) and swin[-1].grid() == (7, 7) and swin[0].layout == "BHWC"


def test_class_attention_is_labelled() -> None:
    kinds = [block.attention_kind for block in vf.anatomy(build("cait")[0])]
    assert kinds == ["global", "global", "class", "class"]
    assert [block.attention_kind for block in vf.anatomy(build("xcit")[0])] == ["channel", "channel", "class", "class"]
    assert {block.attention_kind for block in vf.anatomy(build("mixer")[0])} == {"none"}
    assert {block.attention_kind for block in vf.anatomy(build("maxvit")[0])} == {"window", "grid"}
