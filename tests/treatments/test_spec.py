"""Specs, read and written, as text and in the state dict of a treated model."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from helpers.tiny import build
from safetensors.torch import load_file, save_file
from torch import nn

import vitfocus as vf
from vitfocus.core.files import digest
from vitfocus.treatments.base import TREATMENTS, Treatment
from vitfocus.treatments.spec import STATE_KEY, parse_treatments, recorded_treatments, split_spec, write_spec
from vitfocus.treatments.surgery import placements


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
        if kind is vf.TestTimeRegisters:  # the one record without a default: its neurons are a model's
            choices.append([("neurons", ((5, 133),)), ("neurons", ((0, 7), (2, 20)))])
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
        ("adl(threshold=nan)", "threshold of at least 0"),
        ("cb(layers=3)", "list of block numbers"),
        ("tap(layers=upper)", "tap has no layers=upper"),
        ("adl(threshold=-1)", "threshold of at least 0"),
        ("adl(rows=0)", "rows of at least 1"),
        ("adl(weight=-0.5)", "weight of at least 0, not -0.5"),
        ("se(reduction=0)", "reduction of at least 1"),
        ("tap(branches=10000000)", "branches of at most 64"),
        ("registers(count=1000000000)", "count of at most 10,000"),
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


SPEC = "cb(layers=upper)+adl"  # no parameter of its own: nothing but the record tells it from a plain model


def specs_in(model: nn.Module) -> str:
    return "+".join(map(str, recorded_treatments(model.state_dict(), "test")))


@pytest.mark.parametrize("spec", [SPEC, "cbs+tap"])
def test_a_plain_model_refuses_and_a_treated_one_takes_both(spec: str) -> None:
    plain, images = build("vit")
    keys = list(plain.state_dict())
    treated = vf.treat_(build("vit", seed=1)[0], spec)
    assert specs_in(treated) == spec and STATE_KEY in treated.state_dict()
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{STATE_KEY}"):
        plain.load_state_dict(treated.state_dict())
    twin = vf.treat_(build("vit", seed=2)[0], spec)
    twin.load_state_dict(treated.state_dict())
    assert torch.equal(twin(images), treated(images))
    lacking = twin.load_state_dict(plain.state_dict(), strict=False)
    assert not lacking.unexpected_keys and STATE_KEY not in lacking.missing_keys and specs_in(twin) == spec
    vf.untreat_(twin)
    assert list(twin.state_dict()) == keys and torch.equal(twin(images), plain(images))
    twin.load_state_dict(plain.state_dict())  # no hook is left behind
    with pytest.raises(RuntimeError, match="Unexpected key"):
        twin.load_state_dict(treated.state_dict())


def test_a_plain_checkpoint_loads_strictly_where_no_parameter_was_added() -> None:
    plain, images = build("vit")
    treated = vf.treat_(build("vit", seed=1)[0], SPEC)
    treated.load_state_dict(plain.state_dict())
    with vf.untreated(treated):
        assert STATE_KEY not in treated.state_dict() and torch.equal(treated(images), plain(images))
    assert specs_in(treated) == SPEC


def test_other_treatments_are_refused_unless_the_load_is_lenient() -> None:
    saved = vf.treat_(build("vit")[0], "cb").state_dict()
    model = vf.treat_(build("vit")[0], "cb(layers=upper)")
    with pytest.raises(RuntimeError, match=r"of 'cb', and the model carries 'cb\(layers=upper\)'"):
        model.load_state_dict(saved)
    model.load_state_dict(saved, strict=False)
    assert specs_in(model) == "cb(layers=upper)"


def test_the_record_follows_the_treatments() -> None:
    model, _ = build("vit")
    vf.treat_(vf.treat_(model, "cbs"), "adl")
    assert specs_in(model) == "cbs+adl"
    with pytest.raises(vf.VitfocusError):
        vf.treat_(model, "tap", "cbs")
    assert specs_in(model) == "cbs+adl"


def test_nothing_that_happens_to_a_model_destroys_it() -> None:
    model, images = build("vit")
    vf.treat_(model, SPEC)
    for changed in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).half(),
        copy.deepcopy(model).to(torch.bfloat16).double(),
        torch.compile(copy.deepcopy(model)),
        nn.DataParallel(copy.deepcopy(model)),
        nn.Sequential(copy.deepcopy(model)),
    ):
        assert isinstance(changed, nn.Module) and specs_in(changed) == SPEC
    twin = copy.deepcopy(model)
    vf.untreat_(twin)
    assert specs_in(model) == SPEC and STATE_KEY not in twin.state_dict()
    state = model.state_dict()
    bare = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    bare.load_state_dict(state)
    assert specs_in(bare) == SPEC and torch.equal(bare(images), model(images))
    wrapped = nn.Sequential(build("vit")[0], nn.Identity())
    vf.treat_(wrapped, "cb")
    assert wrapped(images).shape == (2, 5) and specs_in(wrapped) == "cb"  # a Sequential has no new child to call


def test_a_treated_model_with_the_record_still_exports_and_compiles() -> None:
    model, images = build("vit")
    vf.treat_(model, "cbs+tap")
    with torch.no_grad():
        expected = model(images)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(images), expected)
        exported = torch.export.export(copy.deepcopy(model), (images,))
        torch.testing.assert_close(exported.module()(images), expected)


@pytest.mark.parametrize("file", ["w.safetensors", "w.pth"])
def test_treatments_are_restored_from_a_checkpoint_alone(tmp_path: Path, file: str) -> None:
    arguments = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 3}
    model = vf.create_model(f"vit_tiny_patch16_224+{SPEC}", **arguments).eval()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if file.endswith("pth"):
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / file)
    else:
        save_file(state, tmp_path / file)
    opened = vf.open_model("vit_tiny_patch16_224", weights=tmp_path / file, **arguments)
    images = torch.randn(2, 3, 32, 32)
    assert vf.applied(opened) == vf.applied(model) and torch.equal(opened(images), model(images))

    plain = vf.create_model("vit_tiny_patch16_224", **arguments)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(vf.VitfocusError, match=r"saved with cb\(layers=upper\)\+adl.*treat=True"):
        vf.load_weights(plain, tmp_path / file)
    smaller = vf.create_model("vit_tiny_patch16_224", **{**arguments, "depth": 1})
    with pytest.raises(vf.VitfocusError, match="does not fit the model"):
        vf.load_weights(smaller, tmp_path / file, treat=True)
    assert not vf.applied(smaller) and STATE_KEY not in smaller.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in plain.state_dict().items())
    report = vf.load_weights(plain, tmp_path / file, treat=True)
    assert vf.applied(plain) == vf.applied(model) and report.new == report.missing == report.unexpected == []


def test_a_damaged_record_is_answered_in_a_sentence() -> None:
    model, _ = build("vit")
    state = dict(model.state_dict())
    for record, said in (
        (torch.zeros(20_000, dtype=torch.uint8), "damaged record"),
        (torch.zeros(3), "damaged record"),
        (torch.tensor(list(b"zzz"), dtype=torch.uint8), "no treatment 'zzz'"),
        (torch.tensor([255, 254], dtype=torch.uint8), "is not a treatment"),
    ):
        with pytest.raises(vf.VitfocusError, match=said):
            vf.load_weights(model, {**state, STATE_KEY: record}, treat=True)
    assert not vf.applied(model)


def test_folders_saved_without_a_record_still_load(tmp_path: Path) -> None:
    model = vf.create_model("vit_tiny_patch16_224+cbs+adl", img_size=32, depth=1, embed_dim=24, num_heads=2).eval()
    vf.save(model, tmp_path)
    assert STATE_KEY in load_file(tmp_path / "model.safetensors")
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(vf.load(tmp_path)(images), model(images))

    def rewrite(record: torch.Tensor | None) -> None:
        tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if n != STATE_KEY}
        save_file({**tensors, **({STATE_KEY: record} if record is not None else {})}, tmp_path / "model.safetensors")
        config = json.loads((tmp_path / "config.json").read_text())
        config["sha256"] = digest(tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))

    rewrite(None)
    loaded = vf.load(tmp_path)
    assert torch.equal(loaded(images), model(images)) and specs_in(loaded) == "cbs+adl"
    rewrite(torch.tensor(list(b"cb"), dtype=torch.uint8))
    with pytest.raises(vf.VitfocusError, match=r"was changed: its weights were saved with cb, and config\.json"):
        vf.load(tmp_path)


def test_the_record_survives_torch_save() -> None:
    model = vf.treat_(build("vit")[0], SPEC)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert [str(one) for one in recorded_treatments(torch.load(buffer, weights_only=True), "it")] == SPEC.split("+")
