"""Mask R-CNN on vision transformers: scores, treatments, precision, saving, resuming, evaluating, drawing."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from torch import Tensor

import vitfocus as vf
from vitfocus.data.detection.dataset import CocoDetections, ShapesDetections
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.tasks.detection.evaluation import coco_results, coco_scores, draw_detections
from vitfocus.train import Recipe, load_recipe
from vitfocus.train.run import assemble_run, train
from vitfocus.treatments.save_load import remember_task, task_of

SMALL = {"depth": 6, "embed_dim": 24, "num_heads": 2, "channels": 8, "box_width": 16, "mask_layers": 1, "min_size": 64}
TINY = [
    "model.arguments.embed_dim=24",
    "model.arguments.channels=8",
    "model.arguments.box_width=16",
    "size=32",
    "train_length=12",
    "val_length=6",
    "batch=4",
    "warmup_epochs=0",
    "log_every=1",
    "checkpoint_steps=2",
    "device=cpu",
    "flip=0.5",
    "detect.sides=[32,64]",
]


def tiny(*overrides: str) -> Recipe:
    return load_recipe("shapes_detect", [*TINY, *overrides])


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layout(tmp_path_factory.mktemp("coco") / "root", "coco", 4, val_count=40, size=64)


def disturbed(images: CocoDetections, seed: int) -> list[dict[str, Tensor]]:
    """Findings near the truth: boxes moved, masks shifted, labels mistaken, false ones added, some at crowds."""
    draw = torch.Generator().manual_seed(seed)
    findings = []
    for index in range(len(images)):
        image, target = images.read(index)
        height, width = image.shape[1:]
        corner = torch.rand(4, 2, generator=draw) * 0.7
        false = torch.cat([corner, corner + 0.1 + 0.2 * torch.rand(4, 2, generator=draw)], 1)
        false = false * torch.tensor([width, height] * 2)
        masks = torch.zeros(4, height, width)
        for mask, (x0, y0, x1, y1) in zip(masks, false.long().tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        found = torch.cat([target["boxes"] + 1.5 * torch.randn(target["boxes"].shape, generator=draw), false])
        labels = torch.cat([target["labels"], torch.randint(1, len(images.classes) + 1, (4,), generator=draw)])
        wrong = torch.rand(len(labels), generator=draw) < 0.1
        findings.append(
            {
                "boxes": found,
                "labels": torch.where(wrong, labels % len(images.classes) + 1, labels),
                "scores": torch.rand(len(labels), generator=draw),
                "masks": torch.cat([target["masks"].roll(2, dims=-1).float(), masks])[:, None],
            }
        )
    return findings


def test_average_precision_equals_pycocotools(coco: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = CocoDetections(coco, "val")
    assert any(a["iscrowd"] for a in images.truth()["annotations"])
    found = coco_results(disturbed(images, 0), map(images.image_id, range(len(images))), images.category_ids)
    scores = coco_scores(images.truth(), json.loads(json.dumps(found)))
    known = COCO(str(images.file))
    for kind, measure_, left_out in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        results = [{k: v for k, v in one.items() if k != left_out} for one in copy.deepcopy(found)]
        judge = COCOeval(known, known.loadRes(results), measure_)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        theirs = {f"{kind}_{name}": value for name, value in zip(names, judge.stats[:6], strict=True) if value >= 0}
        ours = {key: value for key, value in scores.items() if key.startswith(kind)}
        assert ours == pytest.approx(theirs, abs=1e-9)
        assert 0.1 < ours[f"{kind}_ap"] < 0.95


def test_detections_inside_a_crowd_are_ignored(coco: Path) -> None:
    images = CocoDetections(coco, "val")
    truth = images.truth()
    right = [
        {"image_id": a["image_id"], "category_id": a["category_id"], "bbox": a["bbox"], "score": 0.5}
        | {"segmentation": encoded(images, a)}
        for a in truth["annotations"]
        if not a["iscrowd"]
    ]
    assert coco_scores(truth, right)["box_ap"] == coco_scores(truth, right)["mask_ap"] == 1.0
    crowd = next(a for a in truth["annotations"] if a["iscrowd"])
    inside = {**right[0], **{key: crowd[key] for key in ("image_id", "category_id", "bbox")}, "score": 0.9}
    inside["segmentation"] = encoded(images, crowd)
    assert coco_scores(truth, [*right, inside, inside])["box_ap"] == 1.0
    assert coco_scores(truth, [*right, inside, inside])["mask_ap"] == 1.0
    bare = next(i["id"] for i in truth["images"] if i["id"] != crowd["image_id"])
    outside = {**inside, "image_id": bare, "bbox": [0, 0, 5, 5]}
    assert coco_scores(truth, [*right, outside])["box_ap"] < 1.0
    assert coco_scores(truth, [])["box_ap"] == 0.0


@pytest.mark.parametrize(("objects", "first"), [(0, 1), (7, -40), (1, 2**60)], ids=["zero", "negative", "huge"])
def test_scores_do_not_depend_on_ids(coco: Path, objects: int, first: int) -> None:
    images = CocoDetections(coco, "val")
    truth, detections = images.truth(), disturbed(images, 0)
    ids = {image["id"]: first + place for place, image in enumerate(truth["images"])}
    changed = {
        **truth,
        "images": [{**image, "id": ids[image["id"]]} for image in truth["images"]],
        "annotations": [{**one, "id": objects, "image_id": ids[one["image_id"]]} for one in truth["annotations"]],
    }
    found = coco_results(detections, ids, images.category_ids)
    moved = [{**one, "image_id": ids[one["image_id"]]} for one in found]
    assert coco_scores(changed, moved) == coco_scores(truth, found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"iscrowd": 1}, "The validation images have no objects"),
        ({"segmentation": {"size": [64, 64], "counts": [5, 5]}}, "The run lengths of annotation .* are not a mask"),
        ({"segmentation": {"size": [64, 64], "counts": "!!"}}, "The run lengths of annotation .* are not a mask"),
        ({"segmentation": {"size": [64, 64], "counts": [-1, 4097]}}, "The run lengths of annotation .* are not a mask"),
        ({"segmentation": {"size": [9, 9], "counts": [81]}}, "The run lengths of annotation .* is 9 x 9 pixels"),
    ],
)
def test_a_truth_that_cannot_be_scored_is_refused_before_evaluation(
    coco: Path, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(coco, root)
    file = root / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"] = [{**one, **change} for one in content["annotations"]]
    file.write_text(json.dumps(content))
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=10, img_size=64, patch_size=8, **SMALL)
    with pytest.raises(vf.VitfocusError, match=sentence):
        vf.evaluate(model, "detection", data=root)
    with pytest.raises(vf.VitfocusError, match=sentence):
        train(tiny("source=coco", f"root={root}"), tmp_path / "run")


def encoded(images: CocoDetections, annotation: dict[str, Any]) -> dict[str, Any]:
    from vitfocus.data.detection.dataset import decode_mask, encode_masks

    return encode_masks(decode_mask(annotation["segmentation"], 64, 64)[None])[0]


def test_layers_inner_leaves_out_the_blocks_that_feed_the_pyramid() -> None:
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224+cbs(layers=inner)", embed_dim=24, num_heads=2)
    treated = {int(name.split("blocks.")[1].split(".")[0]) for name in model.state_dict() if "context" in name}
    assert treated == set(range(12)) - {3, 5, 7, 11}
    assert [block.depth for block in vf.anatomy(model) if block.feeds_pyramid] == [3, 5, 7, 11]
    own = vf.create_model("maskrcnn:vit_tiny_patch16_224+cbs(layers=inner)", indices=[0, 1, 2, 5], **SMALL)
    assert [block.depth for block in vf.anatomy(own) if block.feeds_pyramid] == [0, 1, 2, 5]
    swin = vf.create_model("maskrcnn:swin_tiny_patch4_window7_224", embed_dim=12, min_size=64)
    assert [block.depth for block in vf.anatomy(swin) if block.feeds_pyramid] == [1, 3, 9, 11]
    with pytest.raises(vf.VitfocusError, match="no block feeds one"):
        vf.create_model("vit_tiny_patch16_224+cb(layers=inner)", depth=2)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("maskrcnn:vit_tiny_patch16_224+cb(layers=inner)+tap+adl", {}),
        ("maskrcnn:swin_tiny_patch4_window7_224+cb", {"depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}),
    ],
)
def test_a_treated_detector_takes_any_sizes_and_survives_saving(spec: str, options: Any, tmp_path: Path) -> None:
    options = {**{k: v for k, v in SMALL.items() if not (options and k in ("depth", "num_heads"))}, **options}
    model = vf.create_model(spec, num_classes=3, **options).eval()
    images = [torch.randn(3, 50, 90), torch.randn(3, 100, 40)]
    with torch.no_grad():
        before = model(images)
        again = vf.load(vf.save(model, tmp_path / "model"))(images)
    assert sum(len(one["boxes"]) for one in before) > 0
    for one, other, image in zip(before, again, images, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert one["masks"].shape[-2:] == image.shape[-2:]
        assert (one["boxes"][:, 2] <= image.shape[2]).all() and (one["boxes"] >= 0).all()
    rows = vf.diagnose(model, torch.randint(0, 255, (2, 3, 64, 96), dtype=torch.uint8)).rows
    assert len(rows) == len(vf.anatomy(model)) and all(0 < row["entropy"] <= row["entropy_bound"] for row in rows)


def test_every_parameter_gets_a_gradient_even_without_objects() -> None:
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224+cbs(layers=inner)", num_classes=10, **SMALL)
    images, targets = zip(*(ShapesDetections("train", 2, 64).read(index) for index in range(2)), strict=True)
    empty = {key: value[:0] for key, value in targets[0].items()}
    losses = model([image / 128.0 - 1 for image in images], [targets[0], empty])
    sum(losses.values()).backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(torch.isfinite(loss) for loss in losses.values())
    only_empty = model([images[0] / 128.0 - 1], [empty])
    assert torch.isfinite(sum(only_empty.values())) and only_empty["loss_mask"] == 0


def test_in_bfloat16_anchors_and_boxes_keep_all_their_digits() -> None:
    """In 8 bits a coordinate of 1,000 pixels would be off by up to 4."""
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=2, **{**SMALL, "min_size": 256}).eval()
    seen: dict[str, Tensor] = {}
    model.rpn.anchor_generator.register_forward_hook(lambda *a: seen.update(anchors=a[2][0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model([torch.randn(3, 256, 300)])[0]
    centres = (seen["anchors"][:, 0] + seen["anchors"][:, 2]) / 2
    assert seen["anchors"].dtype == found["boxes"].dtype == torch.float32
    assert len(centres.unique()) >= 304 // 4  # every column of the finest level


def test_region_pooling_uses_the_true_scale_despite_padding() -> None:
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=2, **{**SMALL, "min_size": 33}).eval()
    with torch.no_grad():
        model([torch.randn(3, 33, 33)])  # padded to 64: guessed from the sizes, the scales would be off by two
    pooler = model.roi_heads.box_roi_pool
    assert pooler.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    maps = {str(level): torch.full((1, 1, 64 >> level, 64 >> level), float(level)) for level in range(4)}
    sides = torch.tensor([20.0, 60.0, 120.0, 250.0])  # RoI of side s belongs to level floor(4 + log2(s / 224)) - 2
    boxes = torch.stack([sides * 0, sides * 0, sides, sides], 1)
    assert pooler(maps, [boxes], [(256, 256)]).amax((1, 2, 3)).tolist() == [0.0, 0.0, 1.0, 2.0]


def test_detections_do_not_depend_on_the_other_images_of_a_batch() -> None:
    torch.manual_seed(0)
    options = {**SMALL, "min_size": 32, "max_size": 96, "box_detections_per_img": 5, "box_score_thresh": 0.0}
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=3, **options).eval()
    images = [torch.randn(3, 32, width) for width in (32, 90, 32, 60)]
    with torch.no_grad():
        together, alone = model(images), [model([image])[0] for image in images]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("maskrcnn:vit_tiny_patch16_22", {}, "did you mean 'vit_tiny_patch16_224'"),
        ("maskrcnn:vit_tiny_patch16_224", {"box_nms_tresh": 0.4}, "did you mean 'box_nms_thresh'"),
        ("maskrcnn:vit_tiny_patch16_224", {"dept": 2}, "dept"),
        ("maskrcnn:vit_tiny_patch16_224", {"indices": [1, 2]}, "are not 4"),
        ("maskrcnn:vit_small_patch14_reg4_dinov2", {"depth": 4}, "strides of 14, 14, 14, 14"),
        ("maskrcnn:vit_tiny_patch16_224", {"num_classes": 0}, "at least one class"),
    ],
)
def test_error_for_models_that_cannot_be_built(spec: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vf.VitfocusError, match=sentence):
        vf.create_model(spec, **options)


def test_a_backbone_without_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(
        "timm.models.convit.ConVit.forward_intermediates", raising=False
    )  # as in older versions of timm
    with pytest.raises(vf.VitfocusError, match="returns no features"):
        vf.create_model("maskrcnn:convit_tiny")


def test_a_treated_run_resumes_bit_for_bit_and_its_model_gets_the_same_scores(tmp_path: Path) -> None:
    spec = "spec=maskrcnn:vit_tiny_patch16_224+cbs(layers=inner)+tap+adl(threshold=0.5)"
    recipe = tiny(spec, "optimiser.weight_decay=0.05")
    results = train(recipe, tmp_path / "whole")
    begun = assemble_run(recipe, tmp_path / "parts")
    batches = begun.start(3)
    for _ in range(2):
        begun.train_step(batches)
    begun._checkpoint(must=True)
    train(recipe, tmp_path / "parts", resume="auto")
    first, second = (vf.load(tmp_path / name / "model") for name in ("whole", "parts"))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg", "adl"} <= set(rows[0])
    assert rows[0]["adl"] > 0
    assert task_of(first)["classes"] == ShapesDetections("val", 1, 32).classes
    scores = vf.evaluate(first, "detection", ShapesDetections("val", 6, 32), device="cpu", progress=False)
    assert scores["box_ap"] == pytest.approx(100 * results["last"]["box_ap"])
    assert scores["mask_ap50"] == pytest.approx(100 * results["last"]["mask_ap50"])


def test_a_run_reads_coco_from_disk_and_skips_what_is_broken(coco: Path, tmp_path: Path) -> None:
    copied = write_layout(tmp_path / "data", "coco", 4, val_count=2, size=32)
    victim = sorted((copied / "train2017").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:100])
    more = ["source=coco", f"root={copied}", "train_length=0", "val_length=0", "batch=2", "workers=1"]
    with pytest.raises(vf.VitfocusError, match="cannot be read"):
        train(tiny(*more), tmp_path / "fatal")
    results = train(tiny(*more, "broken=skip"), tmp_path / "run")
    assert list(results["broken_images"]["train"]) == [str(victim)]
    assert task_of(vf.load(tmp_path / "run" / "model"))["category_ids"] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def test_inconsistent_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(vf.VitfocusError, match="write maskrcnn:NAME"):
        train(tiny("spec=vit_tiny_patch16_224"), tmp_path)
    with pytest.raises(vf.VitfocusError, match=r"does not use augment\.mixup"):
        train(replace(tiny(), augment=replace(tiny().augment, mixup=0.1)), tmp_path)


def test_the_suite_scores_a_folder_and_draws_pictures(coco: Path, tmp_path: Path) -> None:
    model = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=10, box_detections_per_img=5, **SMALL)
    scores = vf.evaluate(model, "detection", coco, limit=3, out=tmp_path / "out", pictures=tmp_path, progress=False)
    assert scores.images == 3 and 0 <= scores["box_ap"] <= 100 and "box AP" in str(scores.table())
    numbers = {int(path.stem) for path in tmp_path.glob("*.png")}
    found = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert len(numbers) == 3 and {one["image_id"] for one in found} <= numbers
    kept = [one for one in CocoDetections(coco, "val").truth()["images"] if one["id"] in numbers]
    truth = CocoDetections(coco, "val").truth() | {"images": kept}
    truth["annotations"] = [one for one in truth["annotations"] if one["image_id"] in numbers]
    assert scores["mask_ap"] == pytest.approx(100 * coco_scores(truth, found)["mask_ap"])
    remember_task(model, {"task": "detect", "classes": CocoDetections(coco, "val").classes[::-1]})
    with pytest.raises(vf.VitfocusError, match="than the data has: the same names in another order"):
        vf.evaluate(model, "detection", coco, limit=3, progress=False)
    with pytest.raises(vf.VitfocusError, match="has 3 classes, and the data has 10"):
        other = vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=3, **SMALL)
        vf.evaluate({"a": other}, "detection", coco, device="cpu", progress=False)


def test_drawing_shows_detections_at_their_positions() -> None:
    picture = torch.full((3, 80, 120), 255, dtype=torch.uint8)
    mask = torch.zeros(2, 1, 80, 120)
    mask[0, 0, 50:70, 60:100] = 1
    finding = {"boxes": torch.tensor([[60.0, 50, 100, 70], [0, 0, 40, 40]]), "labels": torch.tensor([2, 1])}
    drawn = draw_detections(picture, finding | {"scores": torch.tensor([0.9, 0.2]), "masks": mask}, ["cup", "ring"])
    assert isinstance(drawn, Image.Image) and drawn.size == (480, 320)
    changed = (np.asarray(drawn) != 255).any(axis=2)
    assert changed[220:270, 260:390].all() and not changed[:150, :].any()


@pytest.mark.slow
def test_smoke_recipe_detects_shapes(tmp_path: Path) -> None:
    assert train("shapes_detect", tmp_path / "run")["last"]["box_ap50"] >= 0.5
