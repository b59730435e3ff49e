"""The short spec: what is written can be read back, and what is misspelt is answered with the nearest word."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import vitfocus as vf
from vitfocus.treatments.base import TREATMENTS, Treatment
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
                values = [*names, *(["upper:3"] if "upper" in names else []), (0, 2, -1)]
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
        ("adl(threshold=nan)", "threshold above 0"),
        ("cb(layers=3)", "list of block numbers"),
        ("tap(layers=upper)", "tap has no layers=upper"),
        ("adl(threshold=0)", "threshold above 0"),
        ("adl(rows=0)", "rows of at least 1"),
        ("se(reduction=0)", "reduction of at least 1"),
        ("cb(variant)", "key=value"),
        ("cb(layers=[0,1)", "brackets"),
        ("cb)", "brackets"),
        ("+cb", "is not a treatment"),
        ("cb layers", "is not a treatment"),
    ],
)
def test_mistakes_are_answered(spec: str, said: str) -> None:
    with pytest.raises(vf.VitfocusError, match=said.replace("(", r"\(")):
        parse_treatments(spec)
