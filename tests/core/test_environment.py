"""A device that is not there is refused in the same words wherever one is named; others than usual work as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import build
from helpers.train_tools import tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.environment import usable_device, versions
from vitfocus.robustness.batches import EvaluationBatch
from vitfocus.robustness.engine import Condition
from vitfocus.robustness.suites.perturbations import flips, frames
from vitfocus.train import train
from vitfocus.treatments import cost
from vitfocus.treatments.attention_diversification import AttentionDiversification, DiversityLoss, RowChoice


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "xpu", "hpu", "vulkan", "opengl", "meta"])
def test_a_device_that_is_not_there_is_one_sentence(name: str) -> None:
    """torch says so by RuntimeError, AssertionError, ImportError and a failed assertion of its own."""
    with pytest.raises(vf.VitfocusError) as caught:
        usable_device(name)
    said = str(caught.value)
    assert repr(name) in said and ": expected cpu" in said and said.endswith(".") and "\n" not in said
    assert len(said) < 200


def test_everyone_refuses_a_gpu_in_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = torch.empty

    def empty(*size: int, device: torch.device | str | None = None, **options: object) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            raise RuntimeError("The NVIDIA driver is too old. Update it.\nSee the manual.")
        return real(*size, device=device, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    expected = "There is no device 'cuda' here (The NVIDIA driver is too old): expected cpu."
    calls: list[Callable[[], object]] = [
        lambda: vf.evaluate(build("vit")[0], "clean", "shapes:4", device="cuda"),
        lambda: train(tiny("device=cuda"), tmp_path / "run"),
    ]
    for call in calls:
        with pytest.raises(vf.VitfocusError) as caught:
            call()
        assert str(caught.value) == expected
    for words in (["diagnose", "vit_tiny_patch16_224"], ["bench", "vit_tiny_patch16_224", "--treat", "cb"]):
        assert main([*words, "--device", "cuda"]) == 2
        assert capsys.readouterr().err == f"vitfocus: {expected}\n"


def test_several_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(vf.VitfocusError, match="expected cpu, cuda:0 or cuda:1"):
        usable_device("cuda:zero")


class NoDoubles(TorchDispatchMode):
    """A device that has no float64, as Apple's: whoever makes one there is told so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "mps":
                assert tensor.dtype != torch.float64, func
        return made


def test_sequences_do_without_float64() -> None:
    """Motions are computed in double precision, and so are the shares of frames: elsewhere where there is none."""

    def change(batch: EvaluationBatch) -> torch.Tensor:
        return frames(batch.images, "rotate", (32, 32), sizes=batch.sizes)

    rotate = Condition("rotate", partial(flips, False, 1), change)
    with FakeTensorMode(), NoDoubles():
        images = torch.empty(2, 3, 40, 48, dtype=torch.uint8, device="mps")
        places = torch.arange(2, device="mps")
        batch = EvaluationBatch(images, places, places, places, sizes=torch.full((2, 2), 40, device="mps"))
        assert change(batch).device.type == "mps"
        (outcome,) = rotate(batch, [lambda part: torch.zeros(len(part), 10, device=part.device)])  # type: ignore[list-item]
    assert outcome["flip"].shape == (2,)


def test_clocks_wait_for_every_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cpu", "mps", "cuda:1"):
        cost._synchronize(torch.device(name))
    assert waited == [torch.device("mps"), torch.device("cuda:1")]


def test_losses_of_a_model_on_several_devices_meet_on_the_first() -> None:
    config = AttentionDiversification(weight=2.0)
    model = nn.ModuleList(DiversityLoss(config, 0, RowChoice(), number) for number in range(2))
    with FakeTensorMode():
        for number, meter in enumerate(model):
            meter.loss = torch.ones((), device=f"cuda:{number}")  # type: ignore[assignment]
        assert vf.auxiliary_loss(model).device == torch.device("cuda:0")


def test_versions_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run from a source folder, without an installation, must not fail at its end for want of a version number."""
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    found = versions("accelerate", "python")
    assert found["vitfocus"] == vf.__version__ and found["torch"] == found["accelerate"] == "unknown"
