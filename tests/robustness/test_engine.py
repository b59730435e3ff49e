"""The runner: every image once whatever the batch, the order, the crash or the number of processes; and bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.processes import run_in_two_processes
from helpers.robustness_layouts import Blobs, half_right, pictures, write_classes, write_imagenet
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vitfocus as vf
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.robustness import compare, evaluate, load_scores
from vitfocus.robustness.classification import wordnet_ids

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
SOME: dict[str, Any] = {"corruptions": ["shot_noise", "elastic_transform"], "severities": [2], **QUIET}


def tensors(count: int = 10, classes: int = 10) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = Blobs(classes)
    images = pictures(count)
    labels = torch.from_numpy(half_right(model, images, classes))
    return model, torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


def same(first: Any, second: Any) -> bool:
    """Whether two runs hold the same answers for every condition and image."""
    return set(first.samples) == set(second.samples) and all(
        np.array_equal(columns[name]["prediction"], second.samples[cell][name]["prediction"])
        and np.allclose(columns[name]["confidence"], second.samples[cell][name]["confidence"], atol=1e-5)
        for cell, columns in first.samples.items()
        for name in columns
    )


def test_neither_batch_size_nor_workers_nor_a_subset_change_an_image(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path, model, count=11)
    whole = evaluate(model, "imagenet-c", root, batch_size=11, **SOME)
    assert same(whole, evaluate(model, "imagenet-c", root, batch_size=3, **SOME))
    assert same(whole, evaluate(model, "imagenet-c", root, batch_size=4, workers=2, **SOME))
    few = evaluate(model, "imagenet-c", root, limit=4, **SOME)
    picked = [index * 11 // 4 for index in range(4)]
    for cell, columns in few.samples.items():
        assert np.array_equal(columns["blobs"]["prediction"], whole.samples[cell]["blobs"]["prediction"][picked])
    other = evaluate(model, "imagenet-c", root, seed=1, **SOME)
    assert not same(whole, other)


def test_loader_dataset_float_and_uint8_give_the_same_scores() -> None:
    model, images, labels = tensors()
    dataset = TensorDataset(images, labels)
    from_dataset = evaluate(model, "imagenet-c", dataset, batch_size=3, **SOME)
    from_loader = evaluate(model, "imagenet-c", DataLoader(dataset, batch_size=4), **SOME)
    floats = [(part.float() / 255, names) for part, names in DataLoader(dataset, batch_size=5)]
    assert same(from_dataset, from_loader) and same(from_loader, evaluate(model, "imagenet-c", floats, **SOME))
    assert from_loader.fingerprint["data"]["digest"] == from_dataset.fingerprint["data"]["digest"]
    pictured = [(Image.fromarray(image.permute(1, 2, 0).numpy()), int(label)) for image, label in dataset]

    class Pictures(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(pictured)

        def __getitem__(self, index: int) -> Any:
            return pictured[index]

    assert same(from_dataset, evaluate(model, "imagenet-c", Pictures(), **SOME))
    assert evaluate(model, "clean", floats, limit=7, **QUIET).images == 7


def test_models_are_unchanged_and_treated_ones_are_measured() -> None:
    _, images, labels = tensors()
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=10
    )
    model.train()
    plain = evaluate(model, "clean", [(images, labels)], **QUIET)
    assert model.training and all(module.training for module in model.modules())
    vf.treat_(model, vf.ContextBroadcasting())
    treated = evaluate(model, "clean", [(images, labels)], **QUIET)
    assert list(treated.models) == ["vit_tiny_patch16_224+cb"]
    said = treated.fingerprint["models"]["vit_tiny_patch16_224+cb"]
    assert said["treatments"] == "cb" and said["mean"] == [0.5, 0.5, 0.5]
    assert plain.fingerprint["models"]["vit_tiny_patch16_224"]["treatments"] == ""
    twice = evaluate([model, model], "clean", [(images, labels)], **QUIET)
    assert len(twice.models) == 2 and twice.compare(*twice.models).rows[0]["p_value"] == 1


class Fragile(Blobs):
    """Falls over at its n-th call."""

    last = 10**9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls >= self.last:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("kind", ["files", "loader"])
def test_resuming_after_a_crash_repeats_nothing(kind: str, tmp_path: Path) -> None:
    model = Fragile(1000)
    root, images, labels = write_imagenet(tmp_path / "data", model, count=10)
    pairs = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    data: Any = root if kind == "files" else DataLoader(pairs, batch_size=3)
    whole = evaluate(model, "imagenet-c", data, batch_size=3, **SOME)
    run = tmp_path / "run"
    model.calls, model.last = 0, 1 + 2 * 3 + 1  # the trial, two batches of three conditions, one more
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, "imagenet-c", data, batch_size=3, out=run, **SOME)
    assert not (run / "results.json").exists() and list((run / "parts").glob("*.npz"))
    model.last = 10**9
    with pytest.raises(VitfocusError, match="already holds a run"):
        evaluate(model, "imagenet-c", data, batch_size=3, out=run, **SOME)
    model.calls = 0
    resumed = evaluate(model, "imagenet-c", data, batch_size=2, out=run, resume=True, **SOME)
    assert model.calls == 1 + 2 * 3  # four images are left: in twos, or in the loader's threes
    assert same(whole, resumed) and resumed["blobs"]["corruptions"] == whole["blobs"]["corruptions"]
    assert not (run / "parts").exists()
    model.calls = 0
    again = evaluate(model, "imagenet-c", data, out=run, resume=True, **SOME)
    assert model.calls == 1 and same(whole, again) and again.to_dict() == load_scores(run).to_dict()


def test_two_evaluations_do_not_share_a_folder(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path / "data", model, count=4)
    said: list[str] = []

    def again(*_: Any) -> None:
        if (tmp_path / "run" / "protocol.json").exists() and not said:
            said.append("")
            with pytest.raises(VitfocusError, match=f"is in use by process {os.getpid()} on ") as refused:
                evaluate(Blobs(1000), "clean", root, out=tmp_path / "run", resume=True, progress=False)
            said.append(str(refused.value))

    model.register_forward_pre_hook(again)
    evaluate(model, "clean", root, out=tmp_path / "run", progress=False)
    assert len(said) == 2 and not (tmp_path / "run" / ".lock").exists()


def test_a_damaged_part_is_measured_again_and_another_run_is_not_resumed(tmp_path: Path) -> None:
    model = Fragile(10)
    _, images, labels = tensors()
    data = [(images[:5], labels[:5]), (images[5:], labels[5:])]
    model.last = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, "clean", data, out=tmp_path / "run", **QUIET)
    part = next((tmp_path / "run/parts").iterdir())
    part.write_bytes(part.read_bytes()[:50])
    model.last = 10**9
    assert evaluate(model, "clean", data, out=tmp_path / "run", resume=True, **QUIET)["top1"] == 50
    model.head.bias.data += 1
    with pytest.raises(VitfocusError, match=r"holds another run.*models\.blobs\.digest"):
        evaluate(model, "clean", data, out=tmp_path / "run", resume=True, **QUIET)
    with pytest.raises(VitfocusError, match="Resuming needs the folder"):
        evaluate(model, "clean", data, resume=True, **QUIET)


def test_runs_are_compared_only_by_the_same_protocol(tmp_path: Path) -> None:
    first, second = Blobs(1000, seed=0), Blobs(1000, seed=1)
    root, _, _ = write_imagenet(tmp_path / "data", first, count=12)
    for name, model, seed in (("a", first, 0), ("b", second, 0), ("c", second, 9)):
        evaluate(model, "imagenet-c", root, out=tmp_path / name, seed=seed, **SOME)
    good = compare(tmp_path / "a", tmp_path / "b")
    clean = next(row for row in good.rows if row["name"] == "clean")
    assert (
        clean["first"] == 50 and clean["only_first"] - clean["only_second"] == (clean["first"] - clean["second"]) * 0.12
    )
    assert clean["difference"] == pytest.approx(clean["second"] - clean["first"])
    with pytest.raises(VitfocusError, match=r"protocol\.seed \(0 \| 9\)"):
        compare(tmp_path / "a", tmp_path / "c")
    forced = compare(tmp_path / "a", tmp_path / "c", force=True)
    assert forced.differing == ("protocol.seed (0 | 9)",) and "Forced" in str(forced.table())
    with pytest.raises(VitfocusError, match="not a finished run"):
        compare(tmp_path / "a", tmp_path / "nowhere")


def test_bad_folders_are_named_before_anything_runs(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, images, _ = write_imagenet(tmp_path / "data", model, count=4)
    model.calls = 0

    def complaint(suite: str, data: Any, **options: Any) -> str:
        with pytest.raises(VitfocusError) as caught:
            evaluate(model, suite, data, **options, **QUIET)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "There is no folder" in complaint("clean", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no class folders" in complaint("clean", tmp_path / "empty")
    (root / wordnet_ids()[999]).mkdir()
    assert "half extracted" in complaint("clean", root)
    broken = root / wordnet_ids()[999] / "broken.JPEG"
    broken.write_bytes(b"")
    assert "broken.JPEG is empty" in complaint("clean", root)
    broken.write_bytes(b"this is no image")
    assert "broken.JPEG cannot be read as an image" in complaint("clean", root)
    broken.unlink()
    broken.parent.rmdir()
    write_classes(tmp_path / "odd", images[:2], [wordnet_ids()[0], "backup"])
    assert "not in ImageNet: backup" in complaint("clean", tmp_path / "odd")
    assert "4 class folders, but the model has 10 classes" in _complaint_of(Blobs(10), root)
    for severity in (1, 2):
        write_classes(tmp_path / "c/fog" / str(severity), images[: 4 - severity], [wordnet_ids()[0]] * (4 - severity))
    assert "lacks fog/3, fog/4, fog/5" in complaint("imagenet-c", tmp_path / "c", corruptions=["fog"])
    assert "most folders hold 3 images, but fog/2 holds 2" in complaint(
        "imagenet-c", tmp_path / "c", corruptions=["fog"], severities=[1, 2]
    )
    assert "1,000 classes, not 10" in _complaint_of(Blobs(10), tmp_path / "c", "imagenet-c")
    assert "did you mean 'fog'" in complaint("imagenet-c", root, corruptions=["fogg"])
    assert model.calls == 9  # the trial image of each call, and nothing else


def _complaint_of(model: nn.Module, data: Any, suite: str = "clean", **options: Any) -> str:
    with pytest.raises(VitfocusError) as caught:
        evaluate(model, suite, data, **options, **QUIET)
    return str(caught.value)


def test_truncated_image_is_reported_by_name(tmp_path: Path) -> None:
    write_classes(tmp_path, pictures(4, 64), ["a", "a", "b", "b"], suffix="jpg")
    file = tmp_path / "b" / "00000003.jpg"
    file.write_bytes(file.read_bytes()[:-300])
    for workers in (0, 1):
        said = _complaint_of(Blobs(2, size=64), tmp_path, workers=workers)
        assert said.startswith(f"{file} cannot be read as an image") and "\n" not in said


class Strict(Blobs):
    """Takes images of 32 pixels only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 32, "Input width does not match the model."
        return super().forward(x)


def test_bad_tensors_and_models_are_refused() -> None:
    model, images, labels = tensors()
    assert "expected [0, 1]" in _complaint_of(model, [((images / 255 - 0.5) / 0.2, labels)])
    assert "label 12, but the model has the classes 0 to 9" in _complaint_of(model, [(images, labels + 12 - labels)])
    assert "10 images but 3 labels" in _complaint_of(model, [(images, labels[:3])])
    assert "expected batches of (images, labels)" in _complaint_of(model, [images])
    assert "has no images" in _complaint_of(model, [])
    assert "expected images with labels: a folder" in _complaint_of(model, images)
    assert "differ in classes (a: 10, b: 3)" in _complaint_of({"a": model, "b": Blobs(3)}, [(images, labels)])
    assert "evaluate takes a model" in _complaint_of({}, [(images, labels)])
    assert "does not take images of 40x40 pixels" in _complaint_of(Strict(), [(torch.zeros(2, 3, 40, 40), labels[:2])])
    with pytest.raises(VitfocusError, match="There is no device 'cuda:99' here"):
        evaluate(model, "clean", [], device="cuda:99", progress=False)
    assert "did you mean 'float16'" in _complaint_of(model, [], precision="float61")


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from helpers.robustness_layouts import Blobs
from vitfocus.robustness import evaluate
scores = evaluate(Blobs(1000), "imagenet-c", {data!r}, device="cpu", out={out!r}, batch_size=2, progress=False,
                  corruptions=["shot_noise", "elastic_transform"], severities=[2])
assert scores.images == 11 and scores.fingerprint["environment"]["processes"] == 2
"""


def test_two_processes_count_every_image_once(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path / "data", model, count=11)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), data=str(root), out=str(tmp_path / "run")))
    run_in_two_processes(script)
    alone = evaluate(model, "imagenet-c", root, **SOME)
    together = load_scores(tmp_path / "run")
    assert same(alone, together) and compare(alone, together).rows[0]["p_value"] == 1


def run_command(*arguments: str) -> int:
    return main(["evaluate", *arguments])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path / "data", pictures(3, 32), [wordnet_ids()[label] for label in (3, 5, 900)])
    tiny = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=3)
    model, treated = str(tmp_path / "vit"), str(tmp_path / "vit-cb")
    vf.save(tiny, model)
    vf.save(vf.treat_(tiny, "cb"), treated)
    small = [
        "--suite",
        "occlusion",
        "--data",
        str(tmp_path / "data"),
        "--sizes",
        "112",
        "--drops",
        "98",
        "--device",
        "cpu",
    ]
    code = run_command(model, treated, *small, "--limit", "2", "--out", str(tmp_path / "run"), "--json")
    said = json.loads(capsys.readouterr().out)
    assert code == 0 and list(said["models"]) == ["vit", "vit-cb"] and said["images"] == 2
    assert json.loads((tmp_path / "run/results.json").read_text()) == said
    assert run_command("--compare", str(tmp_path / "run"), str(tmp_path / "run")) == 0
    assert "centre/112" in capsys.readouterr().out
    assert run_command("--suite", "list") == 0 and "imagenet-sketch" in capsys.readouterr().out
    assert run_command(model, *small[:3], str(tmp_path / "nowhere")) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert run_command(model, "--suite", "imagenet-d", "--data", str(tmp_path)) == 2
    assert "did you mean" in capsys.readouterr().err
    assert run_command(model, *small, "--eps", "3") == 2
    assert "has no option 'eps'" in capsys.readouterr().err
    assert run_command("--suite", "clean") == 2 and run_command(model, *small, "--weights", "a", "--weights", "b") == 2
    capsys.readouterr()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitfocus.robustness.evaluation.evaluate", interrupted)
    assert run_command(model, *small, "--out", str(tmp_path / "other")) == 130
    assert "use --resume to continue" in capsys.readouterr().err
