"""Loading weights: plain and treated checkpoints, those that do not fit, and files with code."""

from __future__ import annotations

import argparse
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.tiny import build
from safetensors.torch import save_file
from torch import nn

import vitfocus as vf
from vitfocus.treatments.weights import load_weights


def randomise(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_plain_checkpoint_reports_exactly_the_added_names(tmp_path: Path) -> None:
    plain, images = build("vit")
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in plain.state_dict().items()}}, tmp_path / "plain.pth")
    for file in ("plain.safetensors", "plain.pth"):
        model, _ = build("vit", seed=1)
        names = set(model.state_dict())
        vf.treat_(model, "cbs+tap")
        report = vf.load_weights(model, tmp_path / file)
        assert set(report.new) == set(model.state_dict()) - names and set(report.loaded) == names
        assert not report.missing and not report.unexpected
        with vf.untreated(model), torch.no_grad():
            assert torch.equal(model(images), plain(images))


def test_checkpoints_that_do_not_fit_leave_the_model_alone(tmp_path: Path) -> None:
    model, _ = build("vit")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    wrong: dict[str, dict[str, Any]] = {
        "lacks head.bias": {k: v for k, v in state.items() if k != "head.bias"},
        "unexpected surplus": {**state, "surplus": torch.zeros(1)},
        r"head.weight is \(9, 48\) there": {**state, "head.weight": torch.zeros(9, 48)},
        "head.bias is int64 there": {**state, "head.bias": state["head.bias"].long()},
        "head.bias is bool there": {**state, "head.bias": state["head.bias"].bool()},
        "head.bias is complex64 there": {**state, "head.bias": state["head.bias"].to(torch.complex64)},
    }
    for said, content in wrong.items():
        with pytest.raises(vf.VitfocusError, match=said):
            vf.load_weights(model, content)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    report = vf.load_weights(model, wrong["lacks head.bias"], strict=False)
    assert report.missing == ["head.bias"]


def test_files_with_code_are_not_loaded(tmp_path: Path) -> None:
    torch.save({"head.weight": Payload("false")}, tmp_path / "evil.pth")
    with pytest.raises(vf.VitfocusError, match=r"evil\.pth"):
        vf.load_weights(build("vit")[0], tmp_path / "evil.pth")


def test_published_checkpoints_keep_their_arguments_beside_the_weights(tmp_path: Path) -> None:
    """DeiT's, timm's and TAP's scripts save an argparse.Namespace: it is read as plain values, and nothing runs."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    arguments = argparse.Namespace(lr=5e-4, model="deit", blocks=[1, 2], nested=argparse.Namespace(a=None))
    for suffix in ("pth", "pth.tar"):
        torch.save({"model": model.state_dict(), "args": arguments, "epoch": 299}, tmp_path / f"published.{suffix}")
        other = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
        assert not load_weights(other, tmp_path / f"published.{suffix}").missing
        assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("dress", ["inside", "as the class", "as its state", "of its name"])
def test_a_payload_dressed_as_arguments_is_refused(dress: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    disguises: dict[str, Any] = {
        "inside": argparse.Namespace(lr=Payload(f"touch {mark}")),
        "as the class": Reduces((Payload(f"touch {mark}"), ())),
        "as its state": Reduces((argparse.Namespace, (), Payload(f"touch {mark}"))),
        "of its name": Namespace(f"touch {mark}"),
    }
    torch.save({"model": {}, "args": disguises[dress]}, tmp_path / "hostile.pth")
    with pytest.raises(vf.VitfocusError, match=r"holds more than tensors and plain values; nothing was loaded"):
        load_weights(timm.create_model("vit_tiny_patch16_224", depth=1), tmp_path / "hostile.pth")
    assert not mark.exists()
    with pytest.raises(Exception, match="Namespace"):
        torch.save(argparse.Namespace(a=1), tmp_path / "plain.pt")
        torch.load(tmp_path / "plain.pt", weights_only=True)  # the class is not allowed anywhere else


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Namespace(Payload):
    """Another class of that name."""


class Reduces:
    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts if callable(self.parts[0]) else (getattr, (self.parts[0], "x"))


def test_other_treatments_than_the_weights_were_trained_with_are_named() -> None:
    make = partial(vf.create_model, depth=4, num_classes=2)
    trained = randomise(make("vit_tiny_patch16_224+cb(layers=upper)"))
    state = trained.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(make("vit_tiny_patch16_224+cb(layers=[2,3])"), state)  # the same places in other words
    moved = r"other treatments: cb was in blocks 2, 3, and here it is in blocks 1, 2\. "
    with pytest.warns(vf.VitfocusWarning, match=moved):
        load_weights(make("vit_tiny_patch16_224+cb(layers=[1,2])"), state)
    kind = r"cb was in blocks 2, 3, and here it is in no block; cb\(site=attention\) was in no block, and here"
    with pytest.warns(vf.VitfocusWarning, match=kind):
        load_weights(make("vit_tiny_patch16_224+cb(site=attention,layers=upper)"), state)


def test_a_sparse_record_of_treatments_is_refused() -> None:
    model = vf.create_model("vit_tiny_patch16_224+cb", depth=1, img_size=32)
    tensors = {name: tensor.to_sparse() for name, tensor in model.state_dict().items()}
    with pytest.raises(vf.VitfocusError, match="sparse_coo tensor; expected a dense tensor"):
        vf.load_weights(model, tensors)
