"""Every model name timm registers for the covered families: dissected, treated, checked against its own shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import TIMM, build
from torch import nn

import vitfocus as vf
import vitfocus.models
from vitfocus.anatomy import Block
from vitfocus.attention.capture import observing
from vitfocus.treatments.base import Treatment
from vitfocus.treatments.surgery import Surgeon

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
    "swin_transformer_v2_cr": {"depths": (2, 2), "num_heads": (3, 6), "embed_dim": 48},
    "vision_transformer_sam": {"depth": 3},
    "naflexvit": {"depth": 2},
    "twins": {"depths": (2, 2, 2, 2)},
    "pit": {},
    "pvt_v2": {"depths": (1, 1, 1, 1)},
    "mlp_mixer": {},
    "convit": {},
    "cait": {"depth": 2},
    "xcit": {"depth": 2},
    "mvitv2": {},
    "davit": {},
    "maxxvit": {},
    "visformer": {},
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


class Noise(nn.Module):
    """Other tokens every time, of the same shape."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(tokens)


class Nothing(nn.Module):
    """Tokens that are all zero."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * 0


def block_output(model: nn.Module, images: torch.Tensor, block: Block, **changes: nn.Module) -> torch.Tensor:
    """What a block returns while the tokens at some of its ports are sent through modules."""
    surgeon, outputs = Surgeon(Treatment()), []
    handle = block.host.register_forward_hook(lambda module, args, output: outputs.append(output))
    for place, module in changes.items():
        surgeon.route(block.ports[place], module)
    with torch.no_grad():
        model(images)
    surgeon.undo()
    handle.remove()
    return outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]


@pytest.mark.parametrize("family", TIMM)
def test_ports_feed_their_branch_and_nothing_else(family: str) -> None:
    """Whatever comes in at a port does not matter where its branch comes to nothing: the shortcut goes past it."""
    model, images = build(family)
    firsts = {block.stage: block for block in reversed(vf.anatomy(model).trunk)}.values()
    for block in firsts:
        plain = block_output(model, images[:1], block)
        for place in block.ports:
            end = f"{'attention' if place == 'pool' else place.split('.')[0]}.end"
            assert not torch.equal(block_output(model, images[:1], block, **{place: Noise()}), plain), (block, place)
            if end in block.ports and place != end:
                cut = block_output(model, images[:1], block, **{end: Nothing()})
                both = block_output(model, images[:1], block, **{place: Noise(), end: Nothing()})
                assert torch.equal(cut, both), (block, place)


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


def test_feature_extractors() -> None:
    """timm takes most pyramids apart for their features: these are found by their structure."""
    options = {"depths": (2, 2), "embed_dim": 24, "img_size": 56, "features_only": True, "out_indices": (0, 1)}
    apart = vf.anatomy(timm.create_model("swin_tiny_patch4_window7_224", **options))
    assert (apart.found_by, apart.confidence, apart[0].window, apart[-1].grid()) == ("structure", 1.0, (7, 7), (7, 7))
    whole = timm.create_model("swin_tiny_patch4_window7_224", feature_cls="getter", **options).eval()
    images = torch.randn(1, 3, 56, 56)
    with torch.no_grad():
        plain = whole(images)
        treated = vf.treat_(whole, "cb")(images)
    assert vf.anatomy(whole)[0].name == "model.layers.0.blocks.0"
    assert not any(torch.equal(a, b) for a, b in zip(plain, treated, strict=True))


@pytest.mark.parametrize("family", [name for name, (_, options, _) in TIMM.items() if "img_size" in options])
def test_the_size_that_was_asked_for_is_known(family: str) -> None:
    """Some models keep it nowhere but in the shapes of their weights."""
    asked = TIMM[family][1]["img_size"]
    assert vf.anatomy(build(family)[0]).build_size == (asked if isinstance(asked, tuple) else (asked, asked))
