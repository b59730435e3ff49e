"""The record of the treatments in the state dict: who refuses what, what restores what, and what may not destroy it."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from helpers.tiny import build
from safetensors.torch import load_file, save_file
from torch import nn

import vitfocus as vf
from vitfocus.core.files import digest
from vitfocus.treatments.state_record import STATE_KEY, recorded_treatments

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
