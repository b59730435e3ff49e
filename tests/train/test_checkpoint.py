"""Damaged checkpoints (a flipped bit, a missing or cut-off file) are noticed, passed over, and do not count as kept."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import digest
from vitfocus.train import checkpoint
from vitfocus.train.checkpoint import Checkpoint, Checkpoints, OptimiserState, RunRecord, RunState, read_checkpoint


def tiny(step: int) -> Checkpoint:
    optimiser = OptimiserState([{"params": ["a"], "weight_decay": 0.05, "betas": [0.9, 0.999]}], {"a": {"step": step}})
    record = RunRecord(best={"step": step, "top1": 51.5}, seconds=2.5, window=[1.0, 2.0], window_steps=3)
    state = RunState(step, "[engine]\nseed = 1\n", 88, record, {"scale": 65536.0}, optimiser)
    return Checkpoint(state, {"model/a": torch.arange(6.0) + step, "ema/a": torch.ones(3)})


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def damage(folder: Path) -> None:
    flip(folder / "state.safetensors", 8 * ((folder / "state.safetensors").stat().st_size - 2))


def test_every_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.write(tiny(1))
    newest = kept.write(tiny(2))
    before = kept.newest()
    assert before is not None and before.state.step == 2
    draw = random.Random(0)
    for file in sorted(newest.iterdir()):
        sound = file.read_bytes()
        for _ in range(100):
            bit = draw.randrange(8 * len(sound))
            flip(file, bit)
            said: list[str] = []
            found = kept.newest(said.append)
            assert found is not None and found.state.step == 1, f"bit {bit} of {file.name}"
            assert torch.equal(found.tensors["model/a"], tiny(1).tensors["model/a"])
            assert len(said) == 1 and "00000002 is damaged" in said[0] and said[0].endswith("trying the one before.")
            file.write_bytes(sound)
    assert read_checkpoint(newest).state == before.state


def test_a_missing_or_cut_off_file_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.write(tiny(1))
    newest = kept.write(tiny(2))
    draw = random.Random(1)
    for file in sorted(newest.iterdir()):
        sound = file.read_bytes()
        for length in (None, 0, len(sound) - 1, *draw.sample(range(len(sound)), 10)):
            file.unlink()
            if length is not None:
                file.write_bytes(sound[:length])
            said: list[str] = []
            found = kept.newest(said.append)
            assert found is not None and found.state.step == 1 and len(said) == 1, f"{file.name}: {length} bytes"
            file.write_bytes(sound)
        file.write_bytes(sound + b"\n")
        found = kept.newest(said.append)
        assert found is not None and found.state.step == 1, f"{file.name}: a byte more"
        file.write_bytes(sound)
        file.unlink()
        file.mkdir()
        found = kept.newest(said.append)
        assert found is not None and found.state.step == 1, f"{file.name}: a folder"
        file.rmdir()
        file.write_bytes(sound)


def test_damaged_checkpoints_do_not_count_when_old_ones_are_removed(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for step in (8, 9):  # newer than all that follow
        damage(Checkpoints(tmp_path, keep=9).write(tiny(step)))
    for step in (1, 2, 3):
        kept.write(tiny(step))
    assert kept.steps() == [9, 8, 3, 2]
    damage(tmp_path / "00000003")
    kept.write(tiny(4))
    assert kept.steps() == [9, 8, 4, 3, 2]
    kept.write(tiny(5))
    assert kept.steps() == [9, 8, 5, 4]
    found = kept.newest()
    assert found is not None and found.state.step == 5


def test_the_checkpoint_just_written_stays_beside_newer_ones(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    kept.write(tiny(8))
    assert kept.write(tiny(5)).is_dir() and kept.steps() == [8, 5]


def test_the_last_sound_checkpoint_outlives_damaged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    kept.write(tiny(1))
    real = checkpoint.replace_folder

    def fail(final: Path, *arguments: object) -> None:  # a disk that does not hold what it was given
        real(final, *arguments)  # type: ignore[arg-type]
        damage(final)

    monkeypatch.setattr(checkpoint, "replace_folder", fail)
    for step in (2, 3, 4):
        kept.write(tiny(step))
    found = kept.newest()
    assert found is not None and found.state.step == 1


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    written = Checkpoints(tmp_path).write(tiny(1))
    (written / "SHA256SUMS").unlink()
    content = json.loads((written / "state.json").read_text())
    (written / "state.json").write_text(json.dumps(content | {"sha256": digest(written / "state.safetensors")}))
    names = ("state.json", "state.safetensors")
    with pytest.raises(VitfocusError, match=f"has no SHA256SUMS.*`sha256sum {' '.join(names)} > SHA256SUMS`"):
        read_checkpoint(written)
    (written / "SHA256SUMS").write_text("".join(f"{digest(written / name)}  {name}\n" for name in names))
    assert read_checkpoint(written).state == tiny(1).state


@pytest.mark.parametrize("mark", ["new", "old"])
def test_a_link_in_place_of_a_folder_is_removed_but_not_its_target(mark: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    final, place = tmp_path / "model", tmp_path / f".model.{mark}"
    for make in (lambda: place.symlink_to("elsewhere"), place.touch, lambda: os.mkfifo(place), place.mkdir):
        make()
        checkpoint.replace_folder(final, lambda folder: (folder / "a").touch())
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "elsewhere", "kept", "model"]
