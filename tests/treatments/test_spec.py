"""The short spec: what is written can be read back, and what is misspelt is answered with the nearest word."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from helpers.tiny import build

import vitfocus as vf
from vitfocus.treatments.base import TREATMENTS, Treatment
from vitfocus.treatments.placement import placements
from vitfocus.treatments.spec import parse_treatments, split_spec, write_spec


def every_record() -> list[Treatment]:
    records = []
    for kind in TREATMENTS.values():
        choices = []
        for field in dataclasses.fields(kind):
            if "choices" in field.metadata:
                choices.append([(field.name, value) for value in field.metadata["choices"]])
            elif "layers" in field.metadata:
                names = field.metadata["layers"]
                upper = ["upper:3", "upper&inner", "inner&upper:2&[0,-1]"] if "upper" in names else []
                values = [*names, *upper, (0, 2, -1)]
                choices.append([(field.name, value) for value in values])
        records += [kind(**dict(combination)) for combination in itertools.product(*choices)]
    return records


def test_every_record_round_trips() -> None:
    records = [
        *every_record(),
        vf.TokenAwarePooling(branches=6),
        vf.AttentionDiversification(threshold=1.5, weight=0.25, rows=256),
        vf.SqueezeExcitation(reduction=16),
    ]
    assert len(records) > 200
    for record in records:
        assert parse_treatments(str(record)) == [record], str(record)
    assert parse_treatments("+".join(map(str, records))) == records


def test_short_forms() -> None:
    assert str(vf.ContextBroadcasting()) == "cb"
    assert str(vf.ContextBroadcasting(variant="scaled", layers="upper")) == "cbs(layers=upper)"
    assert (
        parse_treatments("cb(variant=scaled)") == parse_treatments("cbs") == [vf.ContextBroadcasting(variant="scaled")]
    )
    base, treatments = split_spec("deit_small_patch16_224+cb(layers=upper)+tap(branches=4)+adl")
    assert base == "deit_small_patch16_224"
    assert write_spec(base, treatments) == "deit_small_patch16_224+cb(layers=upper)+tap+adl"
    assert parse_treatments(" cb( layers = [0, 1] ) + adl ")[0] == vf.ContextBroadcasting(layers=[0, 1])
    assert parse_treatments("") == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tpa", "did you mean 'tap'"),
        ("cb(layer=all)", "did you mean 'layers'"),
        ("cb(variant=scald)", "did you mean 'scaled'"),
        ("cb(layers=uper)", "did you mean 'upper'"),
        ("cb(layers=upper:0)", "cb has no layers=upper:0"),
        ("cb(layers=upper:²)", "cb has no layers"),
        ("cb(layers=upper&iner)", "cb has no layers=iner: did you mean 'inner'"),
        ("cb(layers=upper&)", "cb has no layers=: "),
        ("cb(layers=inner:2)", "cb has no layers=inner:2"),
        ("tap(layers=deep&upper)", "tap has no layers=upper"),
        ("adl(threshold=nan)", "threshold above 0"),
        ("cb(layers=3)", "list of block numbers"),
        ("tap(layers=upper)", "tap has no layers=upper"),
        ("adl(threshold=0)", "threshold above 0"),
        ("adl(rows=0)", "rows of at least 1"),
        ("adl(weight=-0.5)", "weight of at least 0, not -0.5"),
        ("se(reduction=0)", "reduction of at least 1"),
        ("cb(variant)", "key=value"),
        ("cb(layers=upper, layers=[0])", "gives layers twice, as upper and as (0,)"),
        ("cbs(variant=gate)", "cbs is short for cb(variant=scaled)"),
        ("cb(layers=[0,1)", "brackets"),
        ("cb)", "brackets"),
        ("+cb", "is not a treatment"),
        ("cb layers", "is not a treatment"),
    ],
)
def test_mistakes_are_answered(spec: str, said: str) -> None:
    with pytest.raises(vf.VitfocusError, match=re.escape(said)):
        parse_treatments(spec)


@pytest.mark.parametrize("layers", ["[1,1]", "[1,-1]", "all&[1,1]"])
def test_a_block_is_listed_once(layers: str) -> None:
    model, _ = build("vit")
    depth = len(model.blocks)
    layers = layers.replace("-1", str(1 - depth))
    with pytest.raises(vf.VitfocusError, match="lists block 1 twice"):
        vf.treat_(model, f"cb(layers={layers})")
    assert not vf.applied(model)


@pytest.mark.parametrize("mode", ["dilation", "kernel", "average3", "average5", "conv3", "conv5"])
@pytest.mark.parametrize("given", ["branches=2", "init=near_identity"])
def test_an_option_changes_the_model_or_is_refused(mode: str, given: str) -> None:
    """Whether an option does something is found out by the weights that the same seed gives with and without it."""

    def weights(spec: str) -> list[torch.Tensor]:
        model, _ = build("vit")
        torch.manual_seed(1)
        return list(vf.treat_(model, spec).state_dict().values())

    plain = weights(f"tap(mode={mode})")
    try:
        changed = weights(f"tap(mode={mode},{given})")
    except vf.VitfocusError as error:
        assert f"{given.partition('=')[0]} only has an effect with mode=" in str(error)
        assert mode.startswith("average") or (mode.startswith("conv") and "branches" in given)
        return
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(plain, changed, strict=True))


def test_sets_of_layers_are_combined() -> None:
    model, _ = build("vit", depth=6)

    def treated(layers: str) -> list[str]:
        found = [place.block for place in placements(vf.treat_(model, f"se(layers={layers})"))]
        vf.untreat_(model)
        return found

    assert treated("upper&[0,3,-1]") == ["blocks.3", "blocks.5"] == treated("[5,0,3]&upper:3")
    assert treated("all&upper:1") == ["blocks.5"]
    assert vf.ContextBroadcasting(layers=" upper & inner ").layers == "upper&inner"
    assert vf.ContextBroadcasting(layers="[0, 2]").layers == (0, 2)
    with pytest.raises(vf.VitfocusError, match=re.escape("layers=upper:2&[0] selects none of the 6 blocks")):
        treated("upper:2&[0]")
    small = {"depth": 8, "img_size": 64, "embed_dim": 24, "num_heads": 2, "channels": 8, "num_classes": 2}
    segmenter = vf.create_model("upernet:vit_tiny_patch16_224+cb(layers=upper&inner)", **small)
    feeding = [block.name for block in vf.anatomy(segmenter) if block.feeds_pyramid]
    chosen = [place.block for place in placements(segmenter)]
    assert chosen == [block.name for block in vf.anatomy(segmenter)[4:] if block.name not in feeding]
    assert feeding and len(chosen) == 2


def test_a_default_that_is_spelled_out_is_not_refused() -> None:
    model, _ = build("vit")
    assert str(vf.applied(vf.treat_(model, "tap(mode=average3,branches=4,init=default)"))[0]) == "tap(mode=average3)"
    assert parse_treatments("cbs(variant=scaled,layers=upper)") == parse_treatments("cbs(layers=upper)")
