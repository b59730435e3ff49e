"""The CIFAR-100 study's runner at its smallest scale: runs, their JSON, skipping, time limits, and the kept model."""

from __future__ import annotations

import dataclasses
import doctest
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.study_jobs import die, fail, share, succeed
from PIL import Image
from torch import nn

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.dataset import open_images
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.recipes import Data

STUDY = Path(__file__).parents[2] / "studies" / "cifar100"
sys.path[:0] = [] if str(STUDY) in sys.path else [str(STUDY)]

import arms  # noqa: E402
import caches  # noqa: E402
import estimates  # noqa: E402
import finetune  # noqa: E402
import measure  # noqa: E402
import mps  # noqa: E402
import one_run  # noqa: E402
import pool  # noqa: E402
import slots  # noqa: E402
import study  # noqa: E402
from setting import FULL, REHEARSAL, SMOKE, Setting, test_images  # noqa: E402

test_images.__test__ = False  # type: ignore[attr-defined]
LITTLE = dataclasses.replace(SMOKE, corruptions=("contrast", "fog"), test_images=24, reading_images=6)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """The study tells the processes that it starts where compilers keep their caches, and by how many threads."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def setting_in(folder: Path) -> Setting:
    return Setting(None, folder / "results", folder / "work", scale=LITTLE)


def first_run(group: str = "vit-ti", arm: str = "cb-tap-adl") -> arms.Run:
    return arms.Run(arms.ARMS[group][arm], 0)


def choose(setting: Setting, **accuracies: float) -> None:
    """Selection results as if the candidates had been tried."""
    for name, accuracy in accuracies.items():
        keys = dict(key.split("=", 1) for key in arms.CANDIDATES[name.replace("_", "-")])
        path = setting.result(f"selection/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"overrides": keys, "validation_accuracy": accuracy}))


def test_a_run_is_trained_by_the_selected_recipe_and_measured(tmp_path: Path) -> None:
    setting, run = setting_in(tmp_path), first_run()
    with pytest.raises(VitfocusError, match=r"run `study\.py select` first"):
        one_run.run_from_scratch(run, setting)
    one_run.run_candidate("light", setting)
    tried = json.loads(setting.result("selection/light").read_text())
    assert (tried["training_images"], tried["validation_images"]) == (96, 32)
    choose(setting, unmixed=101.0)
    one_run.run_from_scratch(run, setting)
    found = json.loads(setting.result(run.place).read_text())
    assert found["recipe"]["augment"]["mixup"] == 0 and found["recipe"]["engine"]["evaluate_every"] == 0
    assert (found["group"], found["arm"], found["seed"], found["epochs"]) == ("vit-ti", "cb-tap-adl", 0, 1)
    assert "adl" in found["spec"] and str(tmp_path) not in json.dumps(found)
    images, labels = test_images(setting)
    model = vf.load(one_run.model_folder(run, setting))
    by_hand = percent_right(model, images, labels)
    assert found["clean"]["accuracy"] == pytest.approx(by_hand)
    errors = [
        100 - percent_right(model, vf.corrupt(images, "fog", severity, flavour="cifar"), labels) for severity in (1, 5)
    ]
    assert found["corruption"]["by_corruption"]["fog"] == pytest.approx(sum(errors) / 2)
    both = found["corruption"]["by_corruption"].values()
    assert found["corruption"]["mean_error"] == pytest.approx(sum(both) / 2)
    assert set(found["fgsm"]) == {"1/255", "2/255"} and len(found["occlusion"]) == 6
    assert all(len(found["reading"][key]) == 2 for key in (*measure.READINGS, "diagonal"))
    assert all(0 < entry["mean"] <= 1 for entry in found["stability"].values())
    assert not (setting.work / run.place / "checkpoints").exists()


@torch.no_grad()
def percent_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    body = vf.anatomy(model)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (body.mean, body.std))
    return 100 * float((model((images / 255 - mean) / std).argmax(1) == labels).double().mean())


def test_the_diagonal_share_of_uniform_attention_is_one_over_n() -> None:
    model = vf.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24).eval()
    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            nn.init.zeros_(parameter)
    assert measure.diagonal(model, images, batch=2) == pytest.approx([1 / 17] * 2)


def test_every_arm_of_the_study_builds_and_is_named_once() -> None:
    runs = list(arms.study_runs())
    assert len({run.place for run in runs}) == len(runs) == 66 + 15
    assert {run.place for run in arms.study_runs(arms.SCRATCH)} == {r.place for r in runs if r.arm.group != "fine-tune"}
    for group in arms.ORDER:
        seeds = [run.seed for run in arms.study_runs() if run.arm.group == group]
        assert seeds == sorted(seeds) and len(seeds) == 3 * len(arms.ARMS[group])
    places = {f"{run.arm.group}/{run.arm.name}" for run in runs}
    assert len(arms.CANDIDATES) <= 8 and set(REHEARSAL.places) <= places
    specs = {run.arm.spec for run in runs}
    for spec in specs:
        with torch.device("meta"):
            vf.create_model(spec, num_classes=100, depth=2)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitfocus.train.trainer import Trainer

    setting, run, begun = setting_in(tmp_path), first_run("vit-s", "plain"), list[int]()
    choose(setting, shipped=1.0)
    step = Trainer.train_step

    def stopping(self: Trainer, batches: Any) -> None:
        begun.append(self.step)
        step(self, batches)
        if begun == [0, 1]:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "train_step", stopping)
    with pytest.raises(one_run.Stopped, match="step 2"):
        one_run.run_from_scratch(run, setting)
    assert not setting.result(run.place).exists()
    one_run.run_from_scratch(run, setting)
    assert begun == [0, 1, 2, 3] and setting.result(run.place).is_file()


def test_finished_runs_are_skipped_and_other_recipes_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, run = setting_in(tmp_path), first_run()
    monkeypatch.setattr(study, "study_runs", lambda groups, seeds: [run])
    monkeypatch.setattr(pool, "start", lambda log: pytest.fail("a finished run was begun again"))
    choose(setting, shipped=1.0)
    recipe = one_run.recipe_of(run, setting, one_run.selected(setting))
    path = setting.result(run.place)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"recipe": one_run.recipe_record(recipe)}))
    assert study.Study(setting, lambda: float("inf")).train() == 0
    longer = dataclasses.replace(setting, scale=dataclasses.replace(LITTLE, epochs=2))
    with pytest.raises(VitfocusError, match=r"schedule.epochs=1.0 and the study now has 2.0"):
        study.Study(longer, lambda: float("inf")).train()
    choose(setting, fast=2.0)
    with pytest.raises(VitfocusError, match=r"optimiser\.lr"):
        study.Study(setting, lambda: float("inf")).train()


def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    calls = {"a": succeed, "b": fail, "c": die, "d": succeed, "e": succeed}
    jobs = [pool.Job(name, call, ()) for name, call in calls.items()]
    outcome = pool.carry_out(
        jobs,
        workers=2,
        work=tmp_path,
        seconds_left=lambda: float("inf"),
        estimate=lambda job: pool.Expectation(1.0, 1.0),
        say=lambda text: None,
    )
    assert sorted(outcome.done) == ["a", "d", "e"] and not outcome.left
    assert outcome.failed == {"b": "ValueError: as it should", "c": "its process ended with code 3"}
    assert "Traceback" in (tmp_path / "b.error.txt").read_text()


def test_the_time_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not end in time is not begun, what fits after it is, and what is wrongly expected to is stopped."""
    monkeypatch.setattr(pool, "GRACE", 5.0)
    began = time.monotonic()
    expected = {"long": 100.0, "slow": 1.0, "short": 1.0}
    seconds = {"long": 0.0, "slow": 60.0, "short": 0.0}
    jobs = [pool.Job(name, succeed, (seconds[name],)) for name in expected]
    outcome = pool.carry_out(
        jobs,
        workers=2,
        work=tmp_path,
        seconds_left=lambda: 11.0 - (time.monotonic() - began),
        estimate=lambda job: pool.Expectation(expected[job.name], expected[job.name]),
        say=lambda text: None,
    )
    assert (outcome.done, outcome.stopped, outcome.left, outcome.failed) == (["short"], ["slow"], ["long"], {})
    assert time.monotonic() - began < 11.0


def test_the_time_is_filled_by_runs_that_end_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device in miniature: it is busy to the end, nothing is cut off, and each run's work is what it had of it."""
    limit, taken = 9.0, list[tuple[str, float, float]]()
    monkeypatch.setattr(pool, "GRACE", 1.0)
    jobs = [pool.Job(f"run{number}", share, (str(tmp_path / "device"), 0.2, 0.6)) for number in range(30)]
    began = time.monotonic()
    outcome = pool.carry_out(
        jobs,
        workers=3,
        work=tmp_path,
        seconds_left=lambda: limit - (time.monotonic() - began),
        estimate=lambda job: pool.Expectation(0.9, 1.2),
        say=lambda text: None,
        done=lambda job, work, wall: taken.append((job.name, work, wall)),
    )
    assert not outcome.stopped and not outcome.failed and time.monotonic() - began < limit
    assert outcome.left and [name for name, _, _ in taken] == outcome.done and len(taken) >= 3
    assert all(0.2 < work < wall - 0.2 for _, work, wall in taken)
    assert sum(work for _, work, _ in taken) < limit


def test_slots_let_some_compute_while_others_prepare(tmp_path: Path) -> None:
    waiting = slots.Slot(tmp_path, 2)
    with slots.Slot(tmp_path, 2) as first, slots.Slot(tmp_path, 2) as second:
        first.take()
        for step in range(slots.PREPARED + 1):
            assert second.held is None
            second.before_step(step)
        assert second.held is not None
        other = threading.Thread(target=waiting.take, daemon=True)
        other.start()
        other.join(0.2)
        assert waiting.held is None
        first.__exit__()
        other.join(5)
        assert waiting.held is not None
    waiting.__exit__()


def test_estimates_follow_what_was_measured(tmp_path: Path) -> None:
    setting = dataclasses.replace(setting_in(tmp_path), scale=FULL, workers=4)
    each, rest = estimates.GUESSES["vit-ti"]
    guessed = estimates.expected("vit-ti/plain/seed0", setting)
    assert guessed.work == pytest.approx(1.15 * (each * arms.EPOCHS + rest)) and guessed.alone > guessed.work
    estimates.remember(setting, "vit-ti/plain/seed0", 40, 120)
    estimates.remember(setting, "vit-ti/plain/seed1", 60, 200)
    assert estimates.expected("vit-ti/plain/seed2", setting).work == pytest.approx(60 * 1.05)
    assert estimates.expected("vit-ti/tap-adl/seed0", setting).work == pytest.approx(60 * 1.15 * 1.25 * 1.3)
    estimates.remember(setting, "vit-ti/tap-adl/seed0", 50, 180)
    assert estimates.expected("vit-ti/tap-adl/seed1", setting).work == pytest.approx(50 * 1.05)
    assert estimates.expected("vit-s/plain/seed0", setting).work > guessed.work
    assert set(estimates.timings(setting)) == {
        f"vit-ti/{name}" for name in ("plain/seed0", "plain/seed1", "tap-adl/seed0")
    }


def test_what_was_compiled_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here, archive = tmp_path / "there", tmp_path / "here", tmp_path / "out" / "cache.tar.xz"
    noise = random.Random(0)
    files = {
        "fxgraph/ab/key/entry": noise.randbytes(50_000),
        "aotautograd/key/entry": b"a" * 3_000_000,
        "triton/X/_kernel.cubin": b"b" * 3_000_000,
        "triton/Y/triton_poi_fused.cubin": noise.randbytes(60_000),
        "cd/output.py": noise.randbytes(60_000),
        "cd/output.lock": b"",
        "triton/X/tmp.pid_1/_kernel.cubin": b"half",
    }
    for name, content in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    group = {"child_paths": {"_kernel.cubin": str(there / "triton/X/_kernel.cubin")}}
    (there / "triton/X/__grp___kernel.json").write_text(json.dumps(group))
    assert "6 of 6 cached files" in caches.pack(there, archive, limit=10**7)
    caches.unpack(archive, here)
    for name, content in files.items():
        kept = "tmp" not in name and "lock" not in name
        assert (here / name).is_file() == kept and (not kept or (here / name).read_bytes() == content)
    moved = json.loads((here / "triton/X/__grp___kernel.json").read_text())["child_paths"]["_kernel.cubin"]
    assert moved == str(here / "triton/X/_kernel.cubin")
    assert "0 cached files" in caches.unpack(archive, here)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    work, again = tmp_path / "work", tmp_path / "again.tar.xz"
    options = ["--cache-in", str(archive), "--cache-out", str(again), "--work", str(work)]
    assert study.main(["train", "--smoke", *options]) == 2  # nothing is selected; the caches are kept all the same
    assert (work / "compiled/cd/output.py").read_bytes() == files["cd/output.py"] and again.is_file()
    monkeypatch.setattr(caches, "_PIECE", 1000)
    assert "5 of 6" in caches.pack(there, archive, limit=125_000) and archive.stat().st_size <= 125_000
    caches.unpack(archive, tmp_path / "less")
    assert not (tmp_path / "less/triton/Y").exists() and (tmp_path / "less/fxgraph/ab/key/entry").is_file()
    archive.write_bytes(archive.read_bytes()[:3000])
    with pytest.raises(VitfocusError, match="cannot be read"):
        caches.unpack(archive, tmp_path / "broken")


def test_a_service_that_refuses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Multi-Process Service that starts and then gives no process a GPU would fail every run."""
    said, calls = list[str](), tmp_path / "calls"
    control = tmp_path / mps.CONTROL
    control.write_text(f'#!/bin/sh\necho "$1" >> {calls}\ncat > /dev/null\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(mps, "_TRIAL", "raise SystemExit(3)")
    with mps.shared_gpu(True, said.append):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "code 3" in said[0] and calls.read_text().splitlines() == ["-d", ""]
    monkeypatch.setattr(mps, "_TRIAL", "")
    with mps.shared_gpu(True, said.append):
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and len(said) == 1


def test_the_examples_in_the_study_hold() -> None:
    assert all(doctest.testmod(module).failed == 0 for module in (arms, caches, estimates))


def test_insertion_changes_nothing_and_finetuning_starts_from_it(tmp_path: Path) -> None:
    setting = setting_in(tmp_path)
    for name in ("cbs", "tap", "adl"):
        found = finetune.insertion(first_run("fine-tune", name), setting)
        assert found["classes"] == 1000 and found["decisions_changed"] == 0 and found["spread_of_logits"] > 0.1
        assert found["largest_logit_change"] <= (1e-3 if name == "tap" else 0)
    with pytest.raises(VitfocusError, match="changed a logit"):
        finetune.insertion(arms.Run(arms.Arm("fine-tune", "cb", arms.TINY, "cb"), 0), setting)
    run = first_run("fine-tune", "cbs-tap-adl")
    finetune.run_finetuning(run, setting)
    found = json.loads(setting.result(run.place).read_text())
    assert found["insertion"]["largest_logit_change"] > 0 and found["recipe"]["data"]["enlarge"] == 64
    assert 0 <= found["clean"]["accuracy"] <= 100 and found["corruption"]["images"] == 24


def test_the_data_is_known_by_what_its_folder_holds(tmp_path: Path) -> None:
    setting = dataclasses.replace(setting_in(tmp_path), data=tmp_path)
    (tmp_path / "cifar-100-python").mkdir()
    assert setting.data_keys() == ["source=cifar100", f"root={tmp_path}"]
    (tmp_path / "cifar-100-python").rmdir()
    images, labels = shapes_batch(range(12), "val", 32)
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    index: dict[str, Any] = {"classes": [f"class{number}" for number in range(10)]}
    for split in ("train", "test"):
        rows = pixels.reshape(2, 6, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 192, 3)
        Image.fromarray(rows).save(tmp_path / f"{split}.webp", lossless=True, exact=True)
        digest = hashlib.sha256(pixels.data).hexdigest()
        index[split] = {"labels": labels.tolist(), "mosaics": [f"{split}.webp"], "sha256": digest}
    (tmp_path / "index.json").write_text(json.dumps(index))
    source, root = setting.data_keys()
    assert (source, Path(root.removeprefix("root="))) == ("source=arrays", setting.work / "cifar100-arrays")
    opened: Any = open_images(Data(source="arrays", root=root.removeprefix("root="), size=32), "val")
    assert torch.equal(opened.pixels, images) and torch.equal(opened.labels, labels)
    assert list(opened.classes) == index["classes"]
    (tmp_path / "index.json").write_text(json.dumps({**index, "test": {**index["test"], "sha256": "0"}}))
    setting.data_keys()  # converted once
    (setting.work / "cifar100-arrays" / "test.npz").unlink()
    with pytest.raises(VitfocusError, match="differ from the hash"):
        setting.data_keys()


def test_wrong_use_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    for arguments, message in (
        (["train"], "train needs CIFAR-100"),
        (["train", "--data", str(tmp_path)], "holds no CIFAR-100"),
        (["train", "--data", str(tmp_path / "none")], "There is no"),
        (["keep", "vit-ti", "plane", "0", "--smoke"], "did you mean 'plain'"),
        (["keep", "vit-ti", "plain", "0", "--smoke"], "holds no model"),
        (["train", "--smoke"], "run `study.py select` first"),
        (["diagnose"], "name its file with --weights"),
    ):
        assert study.main([*arguments, *work]) == 2
        assert message in capsys.readouterr().err
    for wrong in ("trian", "keep,train"):
        with pytest.raises(SystemExit):
            study.main([wrong, *work])
        assert "there is no step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(200, 44.5, id="the first 200 images"),
        pytest.param(10_000, None, id="all images", marks=pytest.mark.slow),
    ],
)
def test_the_committed_checkpoint_has_the_reported_accuracy(
    count: int, expected: float | None, shared: Path, tmp_path: Path
) -> None:
    folder = STUDY / "results" / "checkpoint"
    if not (shared / "data" / "cifar100").is_dir():
        pytest.skip(f"no CIFAR-100 in {shared / 'data'}")
    import keep

    place = json.loads((folder / "run.json").read_text())["run"]
    setting = Setting(shared / "data" / "cifar100", STUDY / "results", tmp_path)
    assert (folder / "model.safetensors").stat().st_size < 25_000_000
    reported = json.loads((STUDY / "results" / f"{place}.json").read_text())["clean"]["accuracy"]
    images, labels = (one[:count] for one in test_images(setting))
    near = 100 / count if expected else keep.NEAR
    assert keep.accuracy(folder, images, labels) == pytest.approx(expected or reported, abs=near)
