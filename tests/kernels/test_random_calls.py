"""Random calls of the loss and the statistics against whole maps in float64; the kernels in Triton's interpreter.

`test_backends.py` runs this file a second time, in a process in which Triton interprets.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from helpers.random_attention import check_loss, check_statistics, random_call

from vitfocus.kernels.backends import backend, interpreting
from vitfocus.kernels.diversity import chunked

GROUPS = pytest.mark.parametrize("group", range(5))
HALF = (torch.float16, torch.bfloat16)


def check(name: str, seed: int, dtype: torch.dtype, most: int = 40, maps: int = 18, device: str = "cpu") -> None:
    call = random_call(seed, dtype, most, maps).to(device)
    try:
        with backend(name):
            check_loss(call)
            check_statistics(call, 1e-9 if dtype == torch.float64 else 3e-5)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {call}") from error


@pytest.mark.skipif(interpreting(), reason="is run where Triton does not interpret")
@pytest.mark.parametrize("name", ["reference", "chunked"])
@GROUPS
def test_plain_torch(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(group, 200, 5):
        if seed % 3:  # cut into chunks of rows and images, kept or computed again
            pick = Random(seed)
            monkeypatch.setattr(chunked, "CPU_CHUNK", pick.choice([1, 50, 1000]))
            monkeypatch.setattr(chunked, "LEAST_ROWS", 1)
            monkeypatch.setattr(chunked, "KEPT_CHUNK", pick.choice([0, 1 << 20]))
        check(name, seed, torch.float64)
        monkeypatch.undo()


@pytest.mark.skipif(interpreting(), reason="is run where Triton does not interpret")
@GROUPS
def test_plain_torch_in_less_precision(group: int) -> None:
    for seed in range(group, 100, 5):
        check("chunked", seed, (torch.float32, *HALF)[seed % 3])


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 from the start")
@GROUPS
def test_interpreted(group: int) -> None:
    for seed in range(group, 15, 5):
        check("triton", seed, (torch.float32, torch.float16)[seed % 2], most=7, maps=2)


@pytest.mark.slow
@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 from the start")
def test_many_interpreted() -> None:
    for seed in range(1000, 1300):
        check("triton", seed, (torch.float32, torch.float16)[seed % 2], most=70, maps=6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@GROUPS
def test_gpu(group: int) -> None:
    for seed in range(group, 300, 5):
        check("triton", seed, (torch.float32, *HALF)[seed % 3], most=150, device="cuda")
