"""Reading: every layout gives the same images, an epoch is an epoch however it is divided, broken images are named."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train_tools import AUGMENTED, start, tiny
from msgspec.structs import replace
from PIL import Image
from torch import Tensor

from vitfocus.cli import main
from vitfocus.cli.diagnose import image_files
from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.augmentation import Augmenter
from vitfocus.data.classification.batches import (
    EvaluationBatches,
    ResidentBatches,
    stack_labelled,
    train_transform,
    transformed_images,
)
from vitfocus.data.classification.dataset import FolderImages, open_images
from vitfocus.data.classification.shards import ShardImages, _class_names, _index
from vitfocus.data.image_files import Normalise, list_classes
from vitfocus.data.loader import BatchPartition, BatchReader, Broken, SampleBatches, SampleOrder, read_or_broken
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.recipes import Augment, Data
from vitfocus.tasks.base import RunContext
from vitfocus.tasks.classification import ClassificationTask
from vitfocus.train.run import train

ZERO, ONE = (0.0,) * 3, (1 / 255,) * 3
UNCHANGED = Normalise(ZERO, ONE, "cpu")
PLAIN = Augment(crop="none", flip=0.5, randaugment="rand-m9-mstd0.5-inc1", erase=0.3, mixup=0.0, cutmix=0.0)


def pictures(split: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, _ = shapes_batch(range(count), split, 32)
    return images, torch.arange(count) % 3


def png(image: torch.Tensor) -> bytes:
    memory = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(memory, "PNG")
    return memory.getvalue()


def write_folder(root: Path, counts: tuple[int, int] = (30, 12)) -> Path:
    for split, count in zip(("train", "val"), counts, strict=True):
        for index, (image, label) in enumerate(zip(*pictures(split, count), strict=True)):
            file = root / split / f"class{label}" / f"{index:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(image))
    return root


def write_shards(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    for split, count, size in (("train", 30, 8), ("val", 12, 12)):
        samples = list(zip(*pictures(split, count), strict=True))
        for first in range(0, count, size):
            with tarfile.open(root / f"{split}-{first // size:04d}.tar", "w") as tar:
                for index in range(first, min(first + size, count)):
                    image, label = samples[index]
                    as_json = json.dumps({"label": int(label)}).encode()
                    kinds = {
                        "png": png(image),
                        **({"json": as_json} if index % 2 else {"cls": str(int(label)).encode()}),
                    }
                    for kind, content in kinds.items():
                        entry = tarfile.TarInfo(f"{index:04d}.{kind}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))
    (root / "classes.txt").write_text("class0\nclass1\nclass2\n")
    return root


def write_cifar100(root: Path) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for split, count, name in (("train", 30, "train"), ("val", 12, "test")):
        images, labels = pictures(split, count)
        content = {"data": images.flatten(1).numpy(), "fine_labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": ["class0", "class1", "class2"]}))
    return root


def write_arrays(root: Path) -> Path:
    root.mkdir()
    for split, count, name in (("train", 30, "train"), ("val", 12, "test")):
        images, labels = pictures(split, count)
        pixels = images.permute(0, 2, 3, 1).numpy()
        np.savez(root / f"{name}.npz", images=pixels, labels=labels.numpy(), classes=["class0", "class1", "class2"])
    return root


@pytest.mark.parametrize("layout", ["folder", "timm:folder", "shards", "cifar100", "cifar100 folder", "arrays"])
def test_every_layout_gives_the_same_images(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR100

    monkeypatch.setattr(CIFAR100, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    writers: dict[str, Any] = {"shards": write_shards, "cifar100": write_cifar100, "arrays": write_arrays}
    root = writers.get(layout, write_folder)(tmp_path / "data")
    for split, count in (("train", 30), ("val", 12)):
        images = open_images(Data(source=layout.split()[0], root=str(root), size=32), split)
        assert len(images) == count and list(images.classes) == ["class0", "class1", "class2"]
        found = [images.read(index) for index in range(count)]
        got = sorted((label, np.asarray(image.convert("RGB")).tobytes()) for image, label in found)
        expected = zip(*pictures(split, count), strict=True)
        assert got == sorted((int(label), image.permute(1, 2, 0).numpy().tobytes()) for image, label in expected)
        assert (
            len(
                open_images(
                    Data(source=layout.split()[0], root=str(root), size=32, train_length=5, val_length=5), split
                )
            )
            == 5
        )


@pytest.mark.parametrize("layout", ["folder", "arrays"])
def test_a_holdout_divides_the_training_set_and_leaves_the_test_set_alone(layout: str, tmp_path: Path) -> None:
    root = {"folder": write_folder, "arrays": write_arrays}[layout](tmp_path / "data")
    plain = Data(source=layout, root=str(root), size=32)
    divided = replace(plain, holdout=8)

    def pixels(data: Data, split: str) -> list[bytes]:
        images = open_images(data, split)
        return [np.asarray(images.read(index)[0].convert("RGB")).tobytes() for index in range(len(images))]

    kept, held = pixels(divided, "train"), pixels(divided, "val")
    assert (len(kept), len(held)) == (22, 8) and sorted(kept + held) == sorted(pixels(plain, "train"))
    assert not set(held) & set(pixels(plain, "val")) and held == pixels(divided, "val")
    assert pixels(replace(divided, val_length=3), "val") == held[:3]
    digests = {open_images(data, "train").digest() for data in (plain, divided, replace(divided, holdout=9))}
    assert len(digests) == 3
    with pytest.raises(VitfocusError, match="leaves none to train on"):
        open_images(replace(plain, holdout=30), "val")


def test_fashion_mnist_is_padded_and_coloured(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    for name in ("train", "t10k"):
        header = np.array([0x803, 5, 28, 28], ">i4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = np.array([0x801, 5], ">i4").tobytes() + bytes([9, 0, 1, 2, 3])
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    images: Any = open_images(Data(source="fashion-mnist", root=str(tmp_path), size=32), "val")
    assert images.pixels.shape == (5, 3, 32, 32) and images.labels.tolist() == [9, 0, 1, 2, 3]
    assert np.array_equal(images.pixels[:, 2, 2:-2, 2:-2], pixels) and images.pixels.sum() == 3 * pixels.sum(
        dtype=np.int64
    )


def test_arrays_that_are_not_images_and_labels_are_refused(tmp_path: Path) -> None:
    good = {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4)}
    for changed, message in (
        ({}, None),
        ({"images": np.zeros((4, 8, 8))}, "type float64; expected uint8"),
        ({"images": np.zeros((4, 8, 8, 4), np.uint8)}, "expected uint8"),
        ({"labels": np.arange(3)}, "one class number per image"),
        ({"labels": np.arange(4) - 1}, "has the label -1; expected class numbers from 0"),
        ({"labels": np.array([0, 1, 2, 2**62])}, "has the label 4611686018427387904; expected class numbers from 0"),
        ({"labels": np.array([{}] * 4)}, "cannot be read as arrays"),
        ({"classes": np.array(["a", "b"])}, "has the label 3 and only 2 classes"),
    ):
        np.savez(tmp_path / "train.npz", **{**good, **changed})
        with nullcontext() if message is None else pytest.raises(VitfocusError, match=message):
            images: Any = open_images(Data(source="arrays", root=str(tmp_path), size=10), "train")
            assert images.pixels.shape == (4, 3, 10, 10) and list(images.classes) == ["0", "1", "2", "3"]
    (tmp_path / "train.npz").write_bytes((tmp_path / "train.npz").read_bytes()[:200])
    with pytest.raises(VitfocusError, match="cannot be read as arrays"):
        open_images(Data(source="arrays", root=str(tmp_path)), "train")
    said = b"{'descr': '|u1', 'fortran_order': False, 'shape': (True, 8, 8), }"
    odd = b"\x93NUMPY\x01\x00v\x00" + said.ljust(117) + b"\n"
    for member in (b"no array", odd + bytes(64)):
        with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
            for name in good:
                archive.writestr(f"{name}.npy", member)
        with pytest.raises(VitfocusError, match=r"cannot be read as arrays|expected uint8"):
            open_images(Data(source="arrays", root=str(tmp_path)), "train")


def test_a_pattern_of_shards_with_too_many_folders(tmp_path: Path) -> None:
    with pytest.raises(VitfocusError, match="which no shard can match"):
        open_images(Data(source="shards", root=str(tmp_path), train_split="*/" * 2000 + "x.tar"), "train")


def test_missing_data_says_what_to_set(tmp_path: Path) -> None:
    for source, message in (
        ("cifar100", "data.download=true"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("folder", "no folder train or training"),
        ("shards", r"No shard matches train\*.tar"),
        ("arrays", r"no file train.npz or training.npz"),
        ("fodler", "did you mean 'folder'"),
        ("timm:folder", "timm cannot open"),
    ):
        with pytest.raises(VitfocusError, match=message):
            open_images(Data(source=source, root=str(tmp_path)), "train")


@pytest.mark.parametrize("groups", [(), (7, 9, 1, 6)])
def test_each_image_occurs_once_per_epoch_over_all_processes(groups: tuple[int, ...]) -> None:
    """23 images, batches of 6 over 3 processes: epochs do not end with a batch, and none is lost or repeated."""
    seen = [-1] * 138
    orders = [SampleOrder(23, 6, seed=5, groups=groups, window=2) for _ in range(3)]
    for step in range(23):
        for rank in random.Random(step).sample(range(3), 3):
            first, last = BatchPartition(6, rank, 3).rows(0)
            part = orders[rank].indices(step * 6 + first, step * 6 + last).tolist()
            seen[step * 6 + first : step * 6 + last] = part
    whole = SampleOrder(23, 6, seed=5, groups=groups, window=2).indices(0, 138).tolist()
    assert seen == whole
    epochs = [whole[start : start + 23] for start in range(0, 138, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs) and len(set(map(tuple, epochs))) == 6


def test_repeated_augmentation_repeats_within_a_batch() -> None:
    order = SampleOrder(90, 9, repeats=3).indices(0, 90).tolist()
    assert all(sorted(order.count(one) for one in set(order[s : s + 9])) == [3, 3, 3] for s in range(0, 90, 9))
    assert len(set(order)) == 30


def loader(root: Path, partition: BatchPartition, workers: int, start: int, stop: int) -> list[Tensor]:
    """The images of some steps of a run that reads a folder."""
    words = ["source=folder", f"root={root}", f"batch={partition.batch}", f"workers={workers}", "train_length=0"]
    recipe = replace(tiny(*words, "val_length=0"), augment=PLAIN)
    task = ClassificationTask(recipe)
    task.open_data()
    task.start(task.build_model(), RunContext(torch.device("cpu"), partition))
    return [batch.images for batch in task.iterate(start, stop)]


def test_batches_do_not_depend_on_workers_processes_or_where_one_begins(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    whole = loader(root, BatchPartition(8), 0, 0, 5)
    later = loader(root, BatchPartition(8), 2, 3, 5)
    assert all(torch.equal(one, other) for one, other in zip(whole[3:], later, strict=True))
    parts = [loader(root, BatchPartition(8, rank, 2, 2), 0, 2, 4) for rank in (0, 1)]
    for step in (0, 1):
        joined = [parts[rank][2 * step + part] for rank in (0, 1) for part in (0, 1)]
        assert torch.equal(torch.cat(joined), whole[2 + step])
    resident = [
        ResidentBatches(
            *pictures("train", 30),
            SampleOrder(30, 8),
            Augmenter(PLAIN, ZERO, ONE, "cpu", True),
            BatchPartition(8, r, 2),
        )
        for r in (0, 1)
    ]
    alone = ResidentBatches(
        *pictures("train", 30), SampleOrder(30, 8), Augmenter(PLAIN, ZERO, ONE, "cpu", True), BatchPartition(8)
    )
    alone = alone.make(*alone.inputs(7))
    assert torch.equal(torch.cat([one.make(*one.inputs(7)).images for one in resident]), alone.images)


def test_the_strongest_posterize_gives_black_without_an_error() -> None:
    """timm asks for 0 bits at magnitude 10, which Pillow 13 refuses."""
    transform: Any = train_transform(Data(size=32), Augment(crop="none", flip=0.0, randaugment="rand-m10-n1-p1-inc1"))
    operations = next(step for step in transform.transforms if hasattr(step, "ops")).ops
    posterize = next(operation for operation in operations if operation.name.startswith("Posterize"))
    assert np.asarray(posterize(Image.new("RGB", (4, 4), "white"))).max() == 0


def test_evaluation_counts_every_image_once(tmp_path: Path) -> None:
    pixels, _ = pictures("val", 11)
    for processes, batch in ((1, 4), (2, 4), (3, 12)):
        counted: list[int] = []
        lengths = set()
        for rank in range(processes):
            partition = BatchPartition(batch, rank, processes)
            rows = list(EvaluationBatches((pixels, torch.arange(11)), Data(size=32), partition, UNCHANGED))
            lengths.add(len(rows))
            counted += [
                int(label) for _, found, counts in rows for label, one in zip(found, counts, strict=True) if one
            ]
        assert sorted(counted) == list(range(11)) and len(lengths) == 1


def test_broken_images_are_named_and_counted_or_fatal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = write_folder(tmp_path / "data")
    bad = sorted((root / "train" / "class1").iterdir())[0]
    bad.write_bytes(bad.read_bytes()[:60])
    (root / "val" / "class2" / "0002.png").write_text("no image")
    data = ["source=folder", f"root={root}", "size=32", "train_length=0", "val_length=0", "batch=10", "epochs=2"]
    for number, resident in enumerate(("no", "yes")):
        some = [*data, f"resident={resident}", "workers=0"]
        with pytest.raises(VitfocusError, match=f"{bad.name}.*data.broken=skip"):
            train(tiny(*some), tmp_path / f"fatal{number}")
        results = train(tiny(*some, "broken=skip"), tmp_path / f"skip{number}")
        assert list(results["broken_images"]["train"]) == [str(bad)]
        assert len(results["broken_images"]["val"]) == 1 and results["last"]["top1"] * 11 == pytest.approx(
            round(results["last"]["top1"] * 11)
        )
        assert capfd.readouterr().err.count(f"Skipped an unreadable image: {bad}") == 1


def test_a_run_that_a_broken_image_stopped_resumes_without_it(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    (root / "val" / "class2" / "0002.png").write_text("no image")
    data = ["source=folder", f"root={root}", "size=32", "train_length=0", "val_length=0", "batch=10", "epochs=2"]
    data += ["resident=no", "workers=0", "evaluate_every=1"]
    with pytest.raises(VitfocusError, match=r"data\.broken=skip"):
        train(tiny(*data), tmp_path / "run")
    results = train(tiny(*data, "broken=skip"), tmp_path / "run", resume="auto")
    whole = train(tiny(*data, "broken=skip"), tmp_path / "whole")
    assert len(results["broken_images"]["val"]) == 1
    assert (results["steps"], results["last"]) == (whole["steps"], whole["last"])


def test_a_run_with_workers_that_was_stopped_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    """SIGTERM reaches the worker processes as well, as a scheduler sends it; timm's transforms draw the same again."""
    root = write_shards(tmp_path / "data")
    data = ["source=shards", f"root={root}", "size=32", "train_length=0", "val_length=0", "batch=8", "workers=2"]
    everywhere = """
import os, signal, multiprocessing
import vitfocus.train.trainer as trainer
step = trainer.Trainer.train_step
def stopping(self, parts):
    step(self, parts)
    if self.step == 4:
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
trainer.Trainer.train_step = stopping
"""
    whole = start(tmp_path / "whole", *data, *AUGMENTED).results()
    assert start(tmp_path / "run", *data, *AUGMENTED, code=everywhere).results()["steps"] == 4
    again = start(tmp_path / "run", *data, *AUGMENTED, "workers=0").results()
    assert again["finished"] and again["model_sha256"] == whole["model_sha256"]


def test_truncated_or_replaced_shard_is_detected(tmp_path: Path) -> None:
    def write(count: int) -> Path:
        shard = tmp_path / "train-0000.tar"
        with tarfile.open(shard, "w") as tar:
            for number in range(count):
                picture = io.BytesIO()
                Image.new("RGB", (8, 8), (number, 0, 0)).save(picture, "PNG")
                for name, content in ((f"{number}.png", picture.getvalue()), (f"{number}.cls", b"1")):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return shard

    shard = write(3)
    assert len(_index(shard)) == 3
    size = shard.stat().st_size
    write(4)
    assert shard.stat().st_size == size
    os.utime(shard, ns=(1, 1))
    assert len(_index(shard)) == 4
    shard.write_bytes(shard.read_bytes()[:4096])  # between two samples, where tarfile sees nothing wrong
    with pytest.raises(VitfocusError, match="is truncated"):
        _index(shard)


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        *(("cls", text) for text in ("-100", "-1", "1.9", "9" * 30, "9" * 5000, "4294967296", "1_0", "²", "", "cat")),
        *(("json", text) for text in ("-100", "-1", "1.9", "4294967296", "true", "null", '"cat"', "[1]")),
    ],
)
def test_a_label_in_a_shard_is_a_whole_number(kind: str, label: str, tmp_path: Path) -> None:
    shard = tmp_path / "train-0000.tar"
    with tarfile.open(shard, "w") as tar:
        for key, text in (("good", " 2\n"), ("bad", label)):
            content = text if kind == "cls" else f'{{"label": {text}}}'
            for name, data in (("png", png(pictures("train", 1)[0][0])), (kind, content.encode())):
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    images = ShardImages([shard])
    assert images.read(0)[1] == 2
    with pytest.raises(VitfocusError, match=r"train-0000\.tar:bad has the label .*; expected a whole number from 0"):
        images.read(1)
    assert str(read_or_broken(images, 1)).startswith(f"{shard}:bad (has the label ")


def test_an_error_about_an_unknown_label_names_the_sample(tmp_path: Path) -> None:
    """In training and in validation, where the data set does not list its classes."""
    data = Data(source="shards", root=str(write_shards(tmp_path)), size=32, workers=0)
    images, partition = open_images(data, "val"), BatchPartition(4)
    expected = "its label is 2, but there are 2 classes"
    samples = transformed_images(images, train_transform(data, PLAIN), classes=2)
    with pytest.raises(VitfocusError, match=rf"\.tar:\w+ \({expected}, 0 to 1"):
        list(SampleBatches(samples, SampleOrder(len(images), 4), partition, stack_labelled).iterate(0, 3))
    with pytest.raises(VitfocusError, match=rf"\.tar:\w+ \({expected}"):
        list(EvaluationBatches(images, data, partition, UNCHANGED, classes=2))


def test_training_and_evaluation_find_the_same_files_of_a_folder(tmp_path: Path) -> None:
    """GIFs, folders inside class folders, hidden ones: what is trained on is what is measured."""
    picture = Image.fromarray(np.full((8, 8, 3), 90, np.uint8))
    for name in ("a/0.png", "a/1.GIF", "a/deep/er/2.pgm", "b/x.Tiff", "a/.thumbs/3.png", "b/._4.png", ".cache/c/5.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / name, {".gif": "GIF", ".pgm": "PPM"}.get(Path(name).suffix.lower()))
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    trained, measured = FolderImages(tmp_path), list_classes(tmp_path)
    wanted = ["a/0.png", "a/1.GIF", "a/deep/er/2.pgm", "b/x.Tiff"]
    assert sorted(file for file, *_ in trained.samples) == wanted
    assert [entry.name for entry in measured.entries] == wanted and [e.folder for e in measured.entries] == [*"aaab"]
    assert list(trained.classes) == list(measured.classes) == ["a", "b"]
    assert len(image_files(tmp_path, 9)) == 4
    assert all(np.array_equal(np.asarray(trained.read(index)[0])[0, 0], [90] * 3) for index in range(4))
    (tmp_path / "c").mkdir()
    with pytest.raises(VitfocusError, match=r"c holds no image \(bmp, gif"):
        FolderImages(tmp_path)


def test_copies_of_a_broken_image_in_one_batch_are_named_once() -> None:
    said: list[str] = []
    reader = BatchReader(skip=True, say=said.append)
    reader.report([Broken("x", "short"), Broken("x", "short"), Broken("y", "odd")])
    reader.report([Broken("x", "short")])
    assert said == [f"Skipped an unreadable image: {one}" for one in ("x (short)", "y (odd)")]
    assert reader.broken == {"x": "short", "y": "odd"}


def test_a_run_is_evaluated_on_the_images_it_was_validated_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the split that the recipe names, and not of the usual one beside it."""
    root = write_folder(tmp_path / "data", (12, 6))
    (root / "train").rename(root / "seen")
    (root / "val").rename(root / "held")
    write_folder(root, (3, 3))
    words = ["source=folder", f"root={root}", "train_split=seen", "val_split=held", "workers=0", "epochs=1"]
    results = train(tiny(*words, "train_length=0", "val_length=0"), tmp_path / "run")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["images"] == 6 == results["val_images"]
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('source = "folder"', 'source = "shards"'))
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "data.source=shards, but this suite reads one folder per class" in capsys.readouterr().err


def test_links_are_followed_once_and_broken_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cat" / "young").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "young" / "one.png")
    (tmp_path / "cat" / "again").symlink_to(tmp_path / "cat", target_is_directory=True)
    assert [entry.name for entry in list_classes(tmp_path).entries] == ["cat/young/one.png"]
    assert len(FolderImages(tmp_path)) == 1
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(VitfocusError, match=r"gone\.png is a link to a file that does not exist"):
        list_classes(tmp_path)


def test_class_names_beside_shards(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    for text in ("cat\ndog\n", "cat\ndog", "cat\r\ndog\r\n"):
        file.write_bytes(text.encode())
        assert _class_names(tmp_path) == ["cat", "dog"]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(VitfocusError, match="one class name per line"):
        _class_names(tmp_path)


def test_a_folder_that_is_not_named_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        VitfocusError, match=r"The current folder has no folder train .*: set data\.root to the data's f"
    ):
        open_images(Data(source="folder"), "train")
