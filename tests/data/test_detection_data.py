"""Pictures with objects: COCO's layout, crowds, empty pictures, augmentation that boxes and masks follow alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitfocus.core.errors import VitfocusError
from vitfocus.data.detection.batches import DetectionAugment, collate
from vitfocus.data.detection.dataset import CocoDetections, ShapesDetections, decode_mask, open_detections
from vitfocus.data.loader import BatchPartition, SampleBatches, SampleOrder, Samples
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.recipes import Data


@pytest.fixture(scope="session")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layout(tmp_path_factory.mktemp("coco") / "root", "coco", 24, val_count=12, size=48)


def edited(coco: Path, folder: Path, change: Any) -> Path:
    """The same data with other annotations."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "train2017").symlink_to(coco / "train2017")
    content = json.loads((coco / "annotations" / "instances_train2017.json").read_text())
    change(content)
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    return folder


def test_the_layout_holds_what_shapes_draws_and_crowds_are_truth_but_no_target(coco: Path) -> None:
    read, drawn = CocoDetections(coco, "train"), ShapesDetections("train", 24, 48)
    crowds = {a["image_id"] for a in read.truth()["annotations"] if a["iscrowd"]}
    assert crowds
    assert len(read) == 24 and list(read.classes) == list(drawn.classes)
    assert read.category_ids != drawn.category_ids  # COCO's ids have a gap; labels have none
    for index in range(24):
        (image, ours), (_, theirs) = read.read(index), drawn.read(index)
        assert image.dtype == torch.uint8 and image.shape == (3, 48, 48)
        if read.image_id(index) in crowds:
            assert len(ours["labels"]) < len(theirs["labels"])
        else:
            assert all(torch.equal(ours[key], theirs[key]) for key in ("boxes", "labels", "masks"))


def test_pictures_without_an_object_are_kept_for_evaluation_and_dropped_for_training(
    coco: Path, tmp_path: Path
) -> None:
    def change(content: dict[str, Any]) -> None:
        bare, crowded = content["images"][0]["id"], content["images"][1]["id"]
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] != bare]
        for annotation in content["annotations"]:
            annotation["iscrowd"] |= int(annotation["image_id"] == crowded)

    root = edited(coco, tmp_path / "edited", change)
    kept, dropped = CocoDetections(root, "train"), CocoDetections(root, "train", keep_empty=False)
    assert (len(kept), len(dropped)) == (24, 22)
    for index in (0, 1):
        image, target = kept.read(index)
        assert target["boxes"].shape == (0, 4) and target["masks"].shape == (0, 48, 48)
        augmented = DetectionAugment((64, 96), 128, 1.0)((image, target), 0)
        assert augmented[1]["masks"].shape == (0, *augmented[0].shape[1:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.pop("categories"), "lacks the key 'categories'"),
        (lambda c: c.update(images=3), "images is 3; expected a list"),
        (lambda c: c["annotations"].insert(0, "x"), r"annotations\[0\] is 'x'"),
        (
            lambda c: c["annotations"][0].update(image_id=[1]),
            r"annotations\[0\].image_id is \[1\]; expected a whole number",
        ),
        (lambda c: c["annotations"][0].update(category_id={}), "category_id is {}"),
        (
            lambda c: c["annotations"][0].update(segmentation=[[1, 2, 3, "4", 5, 6]]),
            r"segmentation\[0\]\[3\] is '4'; expected a number",
        ),
        (lambda c: c["annotations"][0].update(image_id=7_777_777), "refers to the image 7777777"),
        (lambda c: c["annotations"][0].update(category_id=999), "category 999"),
        (
            lambda c: c["annotations"][0].update(segmentation=[]),
            r"segmentation is \[\]; expected a list of at least 1 value or a table",
        ),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), r"bbox is \[1, 2, 3\]; expected a list of 4 values"),
        (lambda c: c["images"][0].pop("height"), "lacks the key 'height'"),
        (lambda c: c["images"].append(dict(c["images"][0])), "twice"),
        (lambda c: c["categories"][0].pop("name"), "lacks the key 'name'"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, float("nan"), 4]), r"bbox\[2\] is nan; expected a number"),
        (lambda c: c["annotations"][0].update(segmentation={"size": [4, 4]}), "segmentation lacks the key 'counts'"),
        (lambda c: c["images"][3].update(file_name="gone.jpg"), "1 of the 24 images .* the first is gone.jpg"),
    ],
)
def test_annotations_that_cannot_be_used_are_named_before_training(
    coco: Path, tmp_path: Path, change: Any, sentence: str
) -> None:
    with pytest.raises(VitfocusError, match=sentence):
        CocoDetections(edited(coco, tmp_path / "edited", change), "train")


def test_missing_files_of_a_folder_are_reported(coco: Path, tmp_path: Path) -> None:
    with pytest.raises(VitfocusError, match="There is no data folder"):
        CocoDetections(tmp_path / "absent", "train")
    with pytest.raises(VitfocusError, match=r"instances_train2017.json and the images .*train2017 are missing"):
        CocoDetections(tmp_path, "train")
    with pytest.raises(VitfocusError, match=r"instances_val2014.json and the images .*val2014 are missing"):
        CocoDetections(coco, "val", "val2014")
    with pytest.raises(VitfocusError, match="did you mean 'coco'"):
        open_detections(Data(source="coca"), "train")


def test_the_real_sample_reads_with_masks_that_fill_their_boxes(shared: Path) -> None:
    root = shared / "data" / "coco-sample"
    if not root.is_dir():
        pytest.skip(f"no sample of COCO in {root}")
    train = open_detections(Data(source="coco", root=str(root)), "train", keep_empty=False)
    val = open_detections(Data(source="coco", root=str(root)), "val", classes=train.classes)
    assert len(train.classes) == 80 and train.category_ids[-1] == 90
    assert any(a["iscrowd"] for a in val.truth()["annotations"])
    outside = []
    for images in (train, val):
        for index in range(len(images)):
            target = images.read(index)[1]
            outside += [agreement(box, mask) for box, mask in zip(target["boxes"], target["masks"], strict=True)]
    assert len(outside) > 300 and np.mean(np.array(outside) < 2.5) > 0.99


def agreement(box: Tensor, mask: Tensor) -> float:
    """The largest distance between a box's sides and those of the tight box of its mask."""
    rows, columns = mask.nonzero(as_tuple=True)
    tight = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return float((tight - box).abs().max())


@pytest.mark.parametrize("jitter", [(1.0, 1.0), (0.4, 2.0)])
def test_boxes_and_masks_stay_together_through_augmentation(jitter: tuple[float, float]) -> None:
    images = ShapesDetections("train", 12, 64)
    augment = DetectionAugment((64, 160), 150, 0.5, jitter)
    sizes = set()
    for index in range(12):
        image, target = augment(images.read(index), index)
        sizes.add(tuple(image.shape[1:]))
        assert max(image.shape[1:]) <= (150 if jitter == (1.0, 1.0) else 160)
        assert target["masks"].shape[1:] == image.shape[1:]
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            if jitter == (1.0, 1.0):
                assert agreement(box, mask) <= 2.5  # a pixel of the small picture is as large as that
            if mask.any():
                rows, columns = mask.nonzero(as_tuple=True)
                assert columns.min() >= box[0].floor() - 1 and rows.max() <= box[3].ceil() + 1
    assert len(sizes) > 3


def test_flipping_twice_is_the_identity_and_mirrors_the_masks() -> None:
    image, target = ShapesDetections("val", 4, 48).read(2)
    always = DetectionAugment((48, 48), 48, flip=1.0)
    once = always((image, target), 0)
    assert torch.equal(once[1]["masks"], target["masks"].flip(-1)) and not torch.equal(once[0], image)
    twice = always(once, 0)
    assert torch.equal(twice[0], image) and torch.equal(twice[1]["boxes"], target["boxes"])


def test_a_step_does_not_depend_on_its_division_or_on_the_first_step() -> None:
    images = ShapesDetections("train", 10, 32)
    samples = Samples(images, DetectionAugment((32, 96), 96), seed=3)

    def parts(start: int, rank: int = 0, processes: int = 1, accumulate: int = 1) -> list[Tensor]:
        partition = BatchPartition(4, rank, processes, accumulate)
        batches = SampleBatches(samples, SampleOrder(10, 4, seed=3), partition, collate)
        return [image for batch in batches.iterate(start, 4) for image in batch.images]

    whole = parts(0)
    assert all(map(torch.equal, parts(2), whole[8:]))
    assert all(map(torch.equal, parts(0, accumulate=2), whole))
    halves = parts(3, 0, 2) + parts(3, 1, 2)
    assert all(map(torch.equal, halves, whole[12:]))
    assert len({tuple(image.shape) for image in whole}) > 1


def test_run_lengths_of_another_size_are_not_stretched_over_the_image() -> None:
    assert decode_mask({"size": [2, 3], "counts": [0, 6]}, 2, 3).all()
    for size in ([1, 1], [2, 1], [3, 2], [], [2]):
        with pytest.raises(VitfocusError, match="pixels, and its image 3 x 2"):
            decode_mask({"size": size, "counts": [0, 1]}, 2, 3)
