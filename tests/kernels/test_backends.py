"""Which backend an operation takes, and every kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vitfocus as vf
from vitfocus.kernels.backends import backend, chosen, forced, has_triton
from vitfocus.kernels.diversity.op import diversity


def test_choosing_a_backend() -> None:
    tensor = torch.zeros(1)
    assert chosen(tensor) == chosen(tensor, None) == "chunked"
    with pytest.raises(ZeroDivisionError), backend("reference"):
        assert chosen(tensor) == "reference"
        with backend("auto"):
            assert chosen(tensor) == "chunked"
        raise ZeroDivisionError
    assert forced() == "auto"
    with pytest.raises(vf.VitfocusError, match="'chunked'"), backend("chunk"):
        pass
    if has_triton() and os.environ.get("TRITON_INTERPRET") != "1":
        with backend("triton"):
            with pytest.raises(vf.VitfocusError, match="CUDA"):
                diversity(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), scale=1.0)
            with pytest.raises(vf.VitfocusError, match="float32"):
                chosen(tensor.double())


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "chunked"), ((8, 0), "triton"), ((12, 0), "triton")])
def test_kernels_run_where_triton_compiles(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("vitfocus.kernels.backends._HAS_TRITON", True)
    torch._dynamo.reset()  # compiled code takes a device's capability for a constant
    with FakeTensorMode():
        tensor = torch.empty(1, device="cuda")
        assert chosen(tensor) == name
        traced = torch.compile(lambda x: x + 1 if chosen(x) == "triton" else x.sum(), backend="eager", fullgraph=True)
        assert traced(torch.empty(3, device="cuda")).ndim == (name == "triton")


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *map(str, sorted(here.glob("test_interpreted*.py"))),
        *(str(here / name) for name in ("test_with_attention.py", "test_random_calls.py", "test_inputs.py")),
        "-k",
        "not plain_torch",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=here.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-4000:]
