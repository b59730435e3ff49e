"""Shapes: the same scene every time, annotations that agree with each other, layouts that others can read."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from vitfocus.core.errors import VitfocusError
from vitfocus.data.detection import dataset as coco_masks
from vitfocus.data.shapes import layouts as shapes_layouts
from vitfocus.data.shapes.dataset import CLASSES, MASK_CLASSES, TASKS, VERSION, Shapes, ask, drawn_scenes, shapes_batch
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.data.shapes.paint import SIGNED_DISTANCES, paint
from vitfocus.data.shapes.scene import COLOURS, SHAPES, SLOTS, compose


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


# The same scene every time


@pytest.mark.parametrize("size", [32, (48, 80)])
def test_an_image_does_not_depend_on_its_batch_or_its_place_in_it(size: int | tuple[int, int]) -> None:
    images, labels = shapes_batch(range(70), size=size, seed=3)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    shuffled, shuffled_labels = shapes_batch(order.numpy(), size=size, seed=3)
    assert torch.equal(shuffled, images[order]) and torch.equal(shuffled_labels, labels[order])
    for item in (0, 13, 69):
        assert torch.equal(shapes_batch([item], size=size, seed=3)[0][0], images[item])


@pytest.mark.parametrize("task", TASKS)
def test_a_data_set_gives_the_same_items_one_by_one_and_through_a_loader(task: str) -> None:
    data = Shapes("val", length=12, size=32, seed=1, task=task)
    loader = DataLoader(data, batch_size=5, collate_fn=list)
    loaded = [item for batch in loader for item in batch]
    assert len(loaded) == len(data) == 12
    for index in reversed(range(12)):
        image, target = data[index]
        assert torch.equal(image, loaded[index][0]) and same(target, loaded[index][1])
    assert same(data[-1][1], loaded[11][1])
    with pytest.raises(IndexError):
        data[12]


def test_worker_processes_draw_the_same_pixels() -> None:
    data = Shapes(length=8, size=32, seed=9)
    loaded = torch.cat([images for images, _ in DataLoader(data, batch_size=2, num_workers=2)])
    assert torch.equal(loaded, shapes_batch(range(8), size=32, seed=9)[0])


def test_pixels_match_the_stored_digest_of_this_version() -> None:
    """Every machine draws these very bytes; whoever changes them counts `VERSION` up."""
    images, _ = shapes_batch(range(100), size=(32, 40), seed=7)
    assert (VERSION, zlib.crc32(images.numpy().tobytes())) == (1, 1961905486)


def test_seeds_and_splits_share_no_scene() -> None:
    draws = [shapes_batch(range(400), split, 16, seed)[0] for split in ("train", "val") for seed in (0, 1)]
    assert len(torch.unique(torch.cat(draws).flatten(1), dim=0)) == 1600


def test_a_scene_does_not_depend_on_the_resolution() -> None:
    small, large = (next(drawn_scenes([4], size=size))[0].objects(0) for size in (32, 96))
    assert small == large


def test_every_ten_items_contain_each_class_and_colour_is_uninformative() -> None:
    _, labels = shapes_batch(range(2000), size=16)
    assert (labels.view(-1, 10).sort(dim=1).values == torch.arange(10)).all()
    assert Shapes(length=2000).targets == labels.tolist()
    table = np.zeros((len(SHAPES), len(COLOURS)))
    scenes = compose(range(2000))
    for scene in range(2000):
        (main,) = (thing for thing in scenes.objects(scene) if thing.main)
        assert main.shape == CLASSES[labels[scene]]
        table[labels[scene], COLOURS.index(main.colour)] += 1
    expected = table.sum(0) / len(SHAPES)
    assert ((table - expected) ** 2 / expected).sum() < 100  # chi-square, 63 degrees of freedom: p of about 0.002


# Annotations agree with each other and with the picture


@pytest.mark.parametrize("size", [32, 64, (64, 96), (80, 48)])
def test_masks_boxes_and_objects_agree(size: int | tuple[int, int]) -> None:
    height, width = (size, size) if isinstance(size, int) else size
    items = range(30)
    segmented, detected = (Shapes(length=30, size=size, task=task) for task in ("segment", "detect"))
    for item, (image, mask), (_, target) in zip(items, segmented, detected, strict=False):
        assert image.shape == (3, height, width) and mask.shape == (height, width)
        things = compose([item], extent=(height / min(height, width), width / min(height, width))).objects(0)
        assert Counter(MASK_CLASSES[label] for label in target["labels"]) == Counter(t.shape for t in things)
        assert target["masks"].sum(0).max() == 1  # a pixel shows one object
        rebuilt = (target["masks"] * target["labels"][:, None, None]).sum(0)
        assert torch.equal(rebuilt, mask)
        scale = min(height, width)
        for instance, box, area, thing in zip(
            *(target[key] for key in ("masks", "boxes", "area")), things, strict=True
        ):
            rows, columns = torch.nonzero(instance.any(1)).flatten(), torch.nonzero(instance.any(0)).flatten()
            assert box.tolist() == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert area == instance.sum()
            assert (
                columns[0] + 0.5 >= (thing.x - thing.radius) * scale
                and rows[-1] + 0.5 <= (thing.y + thing.radius) * scale
            )


def test_some_objects_are_partly_hidden_none_wholly_and_the_main_one_is_the_largest() -> None:
    seen = []
    for scenes, _, owner in drawn_scenes(range(400), size=48):
        for slot in range(SLOTS):
            only = scenes.present & (np.arange(SLOTS) == slot)
            _, alone = paint(dataclasses.replace(scenes, present=only), (48, 48))
            whole, rest = ((pixels == slot).sum((1, 2))[only[:, slot]] for pixels in (alone, owner))
            seen += (rest / whole).tolist()
        for scene in range(len(scenes)):
            things = scenes.objects(scene)
            assert max(things, key=lambda thing: thing.radius).main and 1 <= len(things) <= SLOTS
    assert min(seen) > 0.2 and max(seen) == 1
    assert 0.05 < np.mean(np.array(seen) < 0.9) < 0.2


def test_shapes_are_signed_distances_within_the_unit_circle() -> None:
    angle = np.linspace(0, 2 * np.pi, 1000, dtype=np.float32)
    grid = np.linspace(-1.2, 1.2, 400, dtype=np.float32)
    x, y = np.meshgrid(grid, grid)
    for name, figure in SIGNED_DISTANCES.items():
        assert figure(np.cos(angle), np.sin(angle)).min() > 0, name
        field = figure(x, y)
        assert field.dtype == np.float32
        slope = np.hypot(*np.gradient(field, grid, grid))
        assert np.mean(np.abs(slope - 1) < 0.02) > 0.93, name  # but for the creases
        assert 0.15 < (field < 0).mean() * 2.4**2 / np.pi < 0.9, name


def test_object_pixels_have_its_colour() -> None:
    hues = {"red": 0.0, "orange": 0.075, "yellow": 0.145, "green": 0.36, "cyan": 0.5, "blue": 0.61, "purple": 0.76}
    hues["pink"] = 0.9
    for scenes, images, owner in drawn_scenes(range(60), size=64):
        for scene in range(len(scenes)):
            for thing in scenes.objects(scene):
                pixels = images[scene][:, owner[scene] == thing.slot].astype(int)
                hue = (
                    np.median(np.asarray(Image.fromarray(pixels.T[None].astype(np.uint8)).convert("HSV"))[0, :, 0])
                    / 255
                )
                assert abs((hue - hues[thing.colour] + 0.5) % 1 - 0.5) < 0.04, thing


# Questions


def answer(text: str, things: list) -> str:
    """Answer a question from the object list alone, by reading its words."""
    if match := re.fullmatch(r"How many (\w+) are there\?", text):
        if match[1] == "objects":
            return str(len(things))
        singular = {"crosses": "cross"}.get(match[1], match[1].removesuffix("s"))
        assert singular in SHAPES
        return str(sum(thing.shape == singular for thing in things))
    if match := re.fullmatch(r"What color is the (.+)\?", text):
        return only(match[1], things).colour
    if match := re.fullmatch(r"What shape is the (.+)\?", text):
        return only(match[1], things).shape
    if match := re.fullmatch(r"Is there (an|a) (.+)\?", text):
        assert (match[1] == "an") == (match[2][0] in "aeiou")
        return "yes" if matching(match[2], things) else "no"
    match = re.fullmatch(r"Is the (\w+) to the (left|right) of the (\w+)\?", text)
    assert match, text
    one, other = only(match[1], things), only(match[3], things)
    return "yes" if (one.x < other.x) == (match[2] == "left") else "no"


def matching(name: str, things: list) -> list:
    if name == "largest object":
        return [max(things, key=lambda thing: thing.radius)]
    words = [word for word in name.split() if word != "object"]
    return [thing for thing in things if all(word in (thing.shape, thing.colour) for word in words)]


def only(name: str, things: list):  # type: ignore[no-untyped-def]
    (thing,) = matching(name, things)
    return thing


def test_answers_follow_from_the_objects_and_no_constant_answer_does_well() -> None:
    scenes = compose(range(1500), "val", 2)
    first: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for item in range(1500):
        things = scenes.objects(item)
        questions = ask(things, 2, "val", item)
        assert 4 <= len(questions) <= 5 and len({question.kind for question in questions}) == len(questions)
        for question in questions:
            assert question.answer == answer(question.text, things), (question, things)
            assert len(question.answers) == 10 and question.answers.count(question.answer) >= 7
        first[questions[0].answer] += 1
        kinds[questions[0].kind] += 1
    assert first.most_common(1)[0][1] < 0.3 * 1500
    assert len(kinds) == 5 and min(kinds.values()) > 0.1 * 1500


# Layouts


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(root)): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("layout", shapes_layouts.LAYOUTS)
def test_second_call_changes_nothing_but_restores_missing_files(layout: str, tmp_path: Path) -> None:
    root = write_layout(tmp_path / layout, layout, 6, size=32)
    before = snapshot(root)
    lost = next(name for name in sorted(before) if name.endswith(("png", "jpg")))
    write_layout(root, layout, 6, size=32)
    assert snapshot(root) == before and not any(name.endswith(".tmp") for name in before)
    (root / lost).unlink()
    write_layout(root, layout, 6, size=32)
    assert snapshot(root)[lost][1] == before[lost][1]
    with pytest.raises(VitfocusError, match="other Shapes"):
        write_layout(root, layout, 7, size=32)


def test_folder_with_other_contents_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(VitfocusError, match="something other"):
        write_layout(tmp_path, "coco", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_interrupted_write_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError("No space left on device")

    root = write_layout(tmp_path / "a", "imagefolder", 2, size=32)
    before = snapshot(root)
    victim = next(path for path in root.rglob("*.png"))
    victim.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_layout(root, "imagefolder", 2, size=32)
    assert victim.read_bytes() == b"old" and set(snapshot(root)) == set(before)


def test_image_folder(tmp_path: Path) -> None:
    root = write_layout(tmp_path, "imagefolder", 20, val_count=10, size=(32, 48))
    for split, count in (("train", 20), ("val", 10)):
        folder = ImageFolder(str(root / split))
        assert sorted(folder.classes) == sorted(CLASSES) and len(folder) == count
        images, labels = shapes_batch(range(count), split, size=(32, 48))
        for path, target in folder.samples:
            item = int(Path(path).stem)
            assert folder.classes[target] == CLASSES[labels[item]]
            assert np.array_equal(np.asarray(Image.open(path)), images[item].permute(1, 2, 0).numpy())


def test_ade20k_and_cityscapes(tmp_path: Path) -> None:
    ade = write_layout(tmp_path / "ade", "ade20k", 4, val_count=3, size=48)
    city = write_layout(tmp_path / "city", "cityscapes", 4, val_count=3, size=(32, 64))
    own_ids = {7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10}  # from cityscapesScripts
    for split, folder in (("train", "training"), ("val", "validation")):
        for item, (image, mask) in enumerate(Shapes(split, 3, size=48, task="segment")):
            name = f"ADE_{split}_{item + 1:08d}"
            stored = np.asarray(Image.open(ade / "annotations" / folder / f"{name}.png")).astype(int)
            assert np.array_equal(stored[1:-1, 1:-1] - 1, mask[1:-1, 1:-1].numpy()) and not stored[0].any()
            photo = np.asarray(Image.open(ade / "images" / folder / f"{name}.jpg")).astype(float)
            assert np.abs(photo - image.permute(1, 2, 0).numpy()).mean() < 3
        for item, (image, mask) in enumerate(Shapes(split, 3, size=(32, 64), task="segment")):
            stem = f"{split}/shapes/shapes_{item:06d}_000019"
            pixels = np.asarray(Image.open(city / f"leftImg8bit/{stem}_leftImg8bit.png"))
            assert np.array_equal(pixels, image.permute(1, 2, 0).numpy())
            own, trained = (
                np.asarray(Image.open(city / f"gtFine/{stem}_gtFine_{kind}.png"))
                for kind in ("labelIds", "labelTrainIds")
            )
            assert np.array_equal(np.vectorize(lambda value: own_ids.get(value, 255))(own), trained)
            assert np.array_equal(trained[1:-1, 1:-1], mask[1:-1, 1:-1].numpy()) and (trained[:, 0] == 255).all()


def filled(outline: list | dict, shape: tuple[int, int]) -> np.ndarray:
    """Rasterise an annotation independently: PIL on a grid four times as fine, sampled at the pixel centres."""
    if isinstance(outline, dict):
        values = np.repeat(np.arange(len(outline["counts"])) % 2, outline["counts"])
        return values.reshape(shape[::-1]).T.astype(bool)
    canvas = Image.new("1", (shape[1] * 4, shape[0] * 4))
    for polygon in outline:
        ImageDraw.Draw(canvas).polygon([4 * value for value in polygon], fill=1)
    return np.asarray(canvas)[2::4, 2::4]


def test_coco(tmp_path: Path) -> None:
    root = write_layout(tmp_path, "coco", 60, val_count=2, size=64)
    content = json.loads((root / "annotations/instances_train2017.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    assert sorted(names.values()) == sorted(CLASSES) and len({a["id"] for a in content["annotations"]}) > 100
    truth = Shapes("train", 60, task="detect")
    crowds = 0
    for number, image in enumerate(content["images"]):
        assert Image.open(root / "train2017" / image["file_name"]).size == (image["width"], image["height"]) == (64, 64)
        _, target = truth[number]
        union = torch.zeros(64, 64, dtype=torch.int64)
        annotations = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        for annotation in annotations:
            mask = filled(annotation["segmentation"], (64, 64))
            rows, columns = np.nonzero(mask)
            x, y, width, height = annotation["bbox"]
            assert [x, y, x + width, y + height] == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert annotation["area"] == mask.sum()
            union += torch.tensor(mask) * MASK_CLASSES.index(names[annotation["category_id"]])
            crowds += annotation["iscrowd"]
            assert isinstance(annotation["segmentation"], dict if annotation["iscrowd"] else list)
        assert torch.equal(union, (target["masks"] * target["labels"][:, None, None]).sum(0))
        if not any(annotation["iscrowd"] for annotation in annotations):
            assert [a["bbox"][:2] for a in annotations] == target["boxes"][:, :2].tolist()
    assert 1 <= crowds < 15
    val = json.loads((root / "annotations/instances_val2017.json").read_text())
    assert not {i["id"] for i in val["images"]} & {i["id"] for i in content["images"]}


def test_outlines_of_random_masks_with_holes_and_touching_corners() -> None:
    generator = np.random.default_rng(0)
    for share in (0.2, 0.5, 0.8, 0.95):
        mask = generator.random((17, 23)) < share
        mask[0, 0] = mask[-1, -1] = True
        loops = coco_masks.polygons(mask)
        area = 0.0
        for loop in loops:
            x, y = np.array(loop).reshape(-1, 2).T
            part = float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum()) / 2
            assert part > 0  # no holes
            area += part
        assert area == mask.sum()
        rebuilt = sum(inside(loop, mask.shape).astype(int) for loop in loops)
        assert np.array_equal(rebuilt, mask)
        assert np.array_equal(filled(coco_masks.run_lengths(mask), mask.shape), mask)


def inside(loop: list[int], shape: tuple[int, int]) -> np.ndarray:
    """Tell which pixel centres a polygon holds, by counting crossings to the left."""
    corners = np.array(loop).reshape(-1, 2)
    y, x = np.mgrid[: shape[0], : shape[1]] + 0.5
    crossings = np.zeros(shape, int)
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, 0), strict=True):
        if x0 == x1:
            crossings += (min(y0, y1) < y) & (y < max(y0, y1)) & (x0 < x)
    return crossings % 2 == 1


def test_vqav2(tmp_path: Path) -> None:
    root = write_layout(tmp_path, "vqav2", 8, val_count=4, size=48, seed=5)
    for split, count in (("train", 8), ("val", 4)):
        asked = json.loads((root / f"v2_OpenEnded_mscoco_{split}2014_questions.json").read_text())["questions"]
        told = json.loads((root / f"v2_mscoco_{split}2014_annotations.json").read_text())["annotations"]
        assert [q["question_id"] for q in asked] == [a["question_id"] for a in told] and len(asked) == 3 * count
        scenes = compose(range(count), split, 5)
        for question, annotation in zip(asked, told, strict=True):
            item = sorted({q["image_id"] for q in asked}).index(question["image_id"])
            assert annotation["multiple_choice_answer"] == answer(question["question"], scenes.objects(item))
            assert [entry["answer_id"] for entry in annotation["answers"]] == list(range(1, 11))
            assert annotation["answer_type"] in ("yes/no", "number", "other")
            picture = root / f"{split}2014/COCO_{split}2014_{question['image_id']:012d}.jpg"
            assert Image.open(picture).size == (48, 48)
        target = Shapes(split, count, size=48, seed=5, task="answer")[0][1]
        assert target["question"] == asked[0]["question"]
        assert target["answers"] == [entry["answer"] for entry in told[0]["answers"]]


# Mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shapes("tain"), "did you mean 'train'"),
        (lambda: Shapes(task="detekt"), "did you mean 'detect'"),
        (lambda: Shapes(size=8), "at least 16"),
        (lambda: Shapes(length=-1), "length=-1"),
        (lambda: shapes_batch([-1]), "numbered from 0"),
        (lambda: write_layout("/nowhere", "coko", 1), "did you mean 'coco'"),
    ],
)
def test_mistakes_are_explained(make: object, message: str) -> None:
    with pytest.raises(VitfocusError, match=re.escape(message)):
        make()  # type: ignore[operator]


def test_every_task_draws_as_many_scenes_as_are_asked_for() -> None:
    from torch import nn

    from vitfocus.robustness import evaluate
    from vitfocus.robustness.suites.detection import open_evaluation_images
    from vitfocus.robustness.suites.vqa import open_evaluation_questions

    first, more = (open_evaluation_images(f"shapes:{count}", "", nn.Identity()) for count in (3, 9))
    assert len(first) == 3 and torch.equal(first.image(2), more.image(2))
    segmenter = nn.Conv2d(3, 11, 1)
    assert evaluate(segmenter, "segmentation", "shapes:4", device="cpu", progress=False).images == 4
    asked, more = (open_evaluation_questions(f"shapes:{count}").questions for count in (3, 9))
    assert 0 < len(asked) < len(more) and list(more[: len(asked)]) == list(asked)
    with pytest.raises(VitfocusError, match="shapes:300"):
        open_evaluation_images("shapes:many", "", nn.Identity())
