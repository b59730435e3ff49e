"""A device that is not there is refused in the same words wherever one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import build
from train_tools import tiny

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.devices import usable_device
from vitfocus.train import train


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
