"""Many processes: the batch is the recipe's, however it is divided."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.processes import run_in_two_processes
from helpers.train_tools import AUGMENTED, KILL_AT, rows, start, start_many
from safetensors.torch import load_file

MANY = ["spec=vit_tiny_patch16_224+cbs+adl(threshold=0.5)", "epochs=1", "log_every=2", *AUGMENTED]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    start(folder, *MANY).results()
    return folder


def same_curve(one: Path, other: Path) -> None:
    for kind, keys in (("train", ("loss", "ce", "adl")), ("eval", ("loss", "top1"))):
        pairs = list(zip(rows(one, kind), rows(other, kind), strict=True))
        assert pairs and all(row.get("adl", 1.0) > 0 for row, _ in pairs)
        for key in keys:
            assert [b[key] for _, b in pairs] == pytest.approx([a[key] for a, _ in pairs], abs=1e-5)


def test_two_processes_give_the_curve_of_one(alone: Path, tmp_path: Path) -> None:
    """Augmentation, mixing and the diversification loss included; accumulation divides the batch once more."""
    results = [process.results() for process in start_many(tmp_path / "two", *MANY, "accumulate=2")]
    assert results[0]["processes"] == 2 and not results[1]
    same_curve(alone, tmp_path / "two")


@pytest.mark.parametrize(
    ("model", "norms"),
    [
        (["spec=vit_tiny_patch16_224+tap+adl(threshold=0.5)", "model.arguments.patch_size=4"], 2),
        (["spec=localvit_tiny+adl(threshold=0.5)", "model.arguments={depth=1}", "size=32"], 3),
    ],
)
def test_batch_normalisation_over_both_processes(model: list[str], norms: int, tmp_path: Path) -> None:
    """That of Token-aware Average Pooling and of models: loss, weights and running statistics are those of one."""
    keys = [*model, *MANY[1:]]
    start(tmp_path / "one", *keys).results()
    processes = start_many(tmp_path / "two", *keys)
    for process in processes:
        process.results()
    assert "of each of the 2 processes" not in processes[0].error
    same_curve(tmp_path / "one", tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert sum("running_var" in key for key in one) == norms
    assert max(float((one[key] - two[key]).abs().max()) for key in one if "qkv.bias" not in key) < 1e-5
    for key in (key for key in one if "qkv.bias" in key):
        (query, _, value), (others, _, other) = one[key].chunk(3), two[key].chunk(3)
        # A bias of the keys changes nothing: its gradient is rounding alone, which AdamW blows up.
        assert max(float((query - others).abs().max()), float((value - other).abs().max())) < 1e-5


def test_accumulation_with_batch_normalisation_says_what_differs(tmp_path: Path) -> None:
    said = start(tmp_path / "tap", "spec=vit_tiny_patch16_224+tap", "epochs=1", "warmup_epochs=0", "accumulate=2")
    said.results()
    assert "statistics of each of the 2 accumulated parts" in said.error
    said = start(tmp_path / "cb", "spec=vit_tiny_patch16_224+cb", "epochs=1", "warmup_epochs=0", "accumulate=2")
    said.results()
    assert "accumulated parts" not in said.error


#: One batch, divided in the ratio 2 : 1, and the whole of it on each process.
HALVES = """
import torch
from accelerate import PartialState
from torch import nn
from vitfocus.core.modules import SharedBatchNorm2d

rank = PartialState(cpu=True).process_index
torch.manual_seed(0)
images, weights = torch.randn(6, 3, 4, 5, dtype=torch.float64) * 3 + 2, torch.randn(6, 3, 4, 5, dtype=torch.float64)
part = slice(0, 4) if rank == 0 else slice(4, 6)
whole, shared = nn.BatchNorm2d(3).double(), SharedBatchNorm2d(3).double()
inputs = [images.clone().requires_grad_(), images[part].clone().requires_grad_()]
compiled = torch.compile(shared, backend="aot_eager", fullgraph=True)
for _ in range(2):
    outputs = whole(inputs[0]), compiled(inputs[1])
    (outputs[0] * weights).square().sum().backward()
    (outputs[1] * weights[part]).square().sum().backward()
torch.testing.assert_close(outputs[1], outputs[0][part])
torch.testing.assert_close(inputs[1].grad, inputs[0].grad[part])
for name, value in whole.named_buffers():
    torch.testing.assert_close(dict(shared.named_buffers())[name], value)
shared.eval(), whole.eval()
torch.testing.assert_close(shared(images), whole(images))
torch.distributed.destroy_process_group()
"""


def test_shared_batch_normalisation_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Outputs, gradients and running statistics, in unequal parts and one compiled graph."""
    (tmp_path / "script.py").write_text(HALVES)
    run_in_two_processes(tmp_path / "script.py")


def test_one_of_two_is_killed_and_both_resume(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    first, second = start_many(folder, *MANY, codes=("", KILL_AT.format(at=4, signal="SIGKILL")))
    assert second.wait() == -signal.SIGKILL
    assert first.wait() != 0, first.error
    assert not (folder / "results.json").exists()
    for process in start_many(folder, *MANY):
        process.results()
    same_curve(alone, folder)
    one, other = (load_file(path / "model" / "model.safetensors") for path in (alone, folder))
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-4


#: In a child process: a signal as the validation begins.
STOP_IN_VALIDATION = """
import os, signal
import vitfocus.train.trainer as trainer
scores = trainer.Trainer._scores
def stopping(self):
    os.kill(os.getpid(), signal.SIGTERM)
    return scores(self)
trainer.Trainer._scores = stopping
"""


def test_a_signal_to_one_of_two_stops_the_validation_of_both(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes = start_many(folder, *MANY, codes=("", STOP_IN_VALIDATION))
    results = [process.results() for process in processes]
    assert not results[0]["finished"] and results[0]["steps"] == 6 and not rows(folder, "eval")
    for process in start_many(folder, *MANY):
        process.results()
    same_curve(alone, folder)


def test_fsdp2_trains_and_resumes_sharded_and_whole(alone: Path, tmp_path: Path) -> None:
    """Two sharded processes, stopped; two again, stopped; one process that shards nothing to the end."""
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    sharded |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    folder = tmp_path / "run"
    for at in (1, 3):
        stop = KILL_AT.format(at=at, signal="SIGTERM")
        results = [process.results() for process in start_many(folder, *MANY, codes=(stop, stop), **sharded)]
        assert results[0]["steps"] == at + 1 and not results[0]["finished"]
    assert start(folder, *MANY).results()["finished"]
    same_curve(alone, folder)


def test_fsdp2_saves_a_whole_model(alone: Path, tmp_path: Path) -> None:
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    for process in start_many(tmp_path, *MANY, **sharded):
        process.results()
    one, other = (load_file(path / "model" / "model.safetensors") for path in (alone, tmp_path))
    assert max(float((one[key] - other[key]).abs().max()) for key in one) < 1e-4
