"""What people hand to `evaluate`: pictures of several sizes, NumPy's numbers, other data in a resumed run, nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from helpers.robustness_layouts import Blobs, answers, pictures, write_classes, write_imagenet
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.data.shapes.dataset import Shapes
from vitfocus.robustness import compare, evaluate, load_scores
from vitfocus.robustness.classification import wordnet_ids
from vitfocus.robustness.suites.imagenet_variants import read_real
from vitfocus.robustness.suites.occlusion_and_attacks import fgsm, pgd

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}


class Listed(Dataset[Any]):
    """A list as a data set."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], BaseException):
            raise self.items[index]
        return self.items[index]


def tensors(count: int = 6, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(pictures(count, size)).permute(0, 3, 1, 2).contiguous(), torch.arange(count)


def confidence(scores: Any, cell: str = "clean") -> np.ndarray:
    return next(iter(scores.samples[cell].values()))["confidence"]


def refused(match: str, model: Any, suite: str, data: Any, **options: Any) -> None:
    with pytest.raises(VitfocusError, match=match) as caught:
        evaluate(model, suite, data, **{**QUIET, **options})
    assert "\n" not in str(caught.value)


def test_every_picture_is_resized_or_not_by_its_own_size(tmp_path: Path) -> None:
    model = Blobs(10)
    large, fitting = Image.fromarray(pictures(1, 61)[0]), Image.fromarray(pictures(1, 32, seed=1)[0])
    mixed = [(fitting, 0), (large, 1), (large.resize((50, 40)), 2)]
    together = evaluate(model, "clean", Listed(mixed), **QUIET)
    alone = [confidence(evaluate(model, "clean", Listed([item]), **QUIET))[0] for item in mixed]
    assert np.allclose(confidence(together), alone, atol=1e-6)
    assert any("Images of 32x32 pixels were not resized" in note for note in together.notes)
    for index, (picture, _) in enumerate(mixed):
        (tmp_path / f"{index}").mkdir()
        picture.save(tmp_path / f"{index}" / "a.png")
    from_files = evaluate(Blobs(3), "clean", tmp_path, **QUIET)
    assert any(note.startswith("1 of 3 images have 32x32 pixels") for note in from_files.notes)
    by_hand = evaluate(Blobs(3), "clean", Listed(mixed), batch_size=1, **QUIET)
    assert np.allclose(confidence(from_files), confidence(by_hand), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_images_of_several_sizes_are_refused_not_padded(batch_size: int, tmp_path: Path) -> None:
    small, large = (torch.zeros(3, size, size, dtype=torch.uint8) for size in (32, 40))
    refused(
        "item 2 has 40x40 pixels, others 32x32",
        Blobs(10),
        "clean",
        Listed([(small, 0), (small, 1), (large, 2)]),
        batch_size=batch_size,
    )
    for index, size in enumerate((32, 40)):
        write_classes(tmp_path / "data", pictures(1, size), [f"{index}"])
    refused("1/00000000.png has 40x40", Blobs(2), "clean", tmp_path / "data", resize=False, batch_size=batch_size)


def test_clean_images_beside_published_ones_are_cropped_to_their_size(tmp_path: Path) -> None:
    """A model of another size scales both itself; the clean ones were once scaled from whatever size they had."""
    model = Blobs(1000, size=24)
    write_classes(tmp_path / "c/fog/3", pictures(3, 32), [wordnet_ids()[i] for i in range(3)])
    photographs = [Image.fromarray(image) for image in pictures(3, 70, seed=2)]
    photographs[1] = photographs[1].resize((90, 60))
    cut = []
    for index, photograph in enumerate(photographs):
        folder = tmp_path / "clean" / wordnet_ids()[index]
        folder.mkdir(parents=True)
        photograph.save(folder / "a.png")
        scale = 36 / min(photograph.size)
        small = photograph.resize((int(photograph.width * scale), int(photograph.height * scale)), 2)
        left, top = round((small.width - 32) / 2), round((small.height - 32) / 2)
        cut.append(np.array(small.crop((left, top, left + 32, top + 32))))
    options: dict[str, Any] = {"corruptions": "fog", "severities": 3, "clean_data": tmp_path / "clean", **QUIET}
    whole = evaluate(model, "imagenet-c", tmp_path / "c", batch_size=3, **options)
    single = evaluate(model, "imagenet-c", tmp_path / "c", batch_size=1, **options)
    write_classes(tmp_path / "cut", np.stack(cut), [wordnet_ids()[i] for i in range(3)])
    by_hand = evaluate(model, "imagenet-c", tmp_path / "c", **{**options, "clean_data": tmp_path / "cut"})
    assert np.allclose(confidence(whole), confidence(single), atol=1e-6)
    assert np.allclose(confidence(whole), confidence(by_hand), atol=1e-6)


def test_an_index_file_serves_any_model(tmp_path: Path) -> None:
    model, images = Blobs(12), pictures(5)
    labels = answers(model, images)
    write_classes(tmp_path / "data", images, [f"{label}" for label in labels])
    index = tmp_path / "index.json"
    index.write_text(json.dumps({str(label): label for label in range(12)}))
    assert evaluate(model, "clean", tmp_path / "data", index=index, **QUIET)["top1"] == 100
    refused("There is no .*nowhere.json", model, "clean", tmp_path / "data", index=tmp_path / "nowhere.json")
    refused("has the classes 0 to 2", Blobs(3), "clean", tmp_path / "data", index=index)
    refused("maps class folders to classes, and the data has none", model, "clean", [tensors()], index=index)


def test_v2_accepts_the_published_folder_names(tmp_path: Path) -> None:
    for name in ("matched-frequency", "threshold0.7", "top-images"):
        write_classes(tmp_path / f"imagenetv2-{name}-format-val", pictures(1), ["0"])
    scores = evaluate(Blobs(1000), "imagenet-v2", tmp_path, **QUIET)
    assert list(scores.samples) == ["matched-frequency", "threshold0.7", "topimages"]
    assert not any("missing" in note for note in scores.notes)
    alone = evaluate(Blobs(1000), "imagenet-v2", tmp_path / "imagenetv2-top-images-format-val", **QUIET)
    assert list(alone.samples) == ["topimages"]


@pytest.mark.parametrize("kind", ["data set", "batches"])
def test_a_run_is_resumed_with_its_own_data_only(kind: str, tmp_path: Path) -> None:
    model, run = Blobs(10), tmp_path / "run"
    images, labels = tensors()

    def data(pixels: torch.Tensor, names: torch.Tensor = labels, broken: bool = False) -> Any:
        if kind == "data set":
            items: list[Any] = list(zip(pixels, names.tolist(), strict=True))
            return Listed([*items[:4], RuntimeError("power cut"), *items[5:]] if broken else items)
        parts = [(pixels[i : i + 2], names[i : i + 2]) for i in range(0, 6, 2)]
        return iter([*parts[:2], "power cut"]) if broken else parts

    with pytest.raises((RuntimeError, VitfocusError)):
        evaluate(model, "clean", data(images, broken=True), out=run, batch_size=2, **QUIET)
    assert list((run / "parts").iterdir())
    again: dict[str, Any] = {"out": run, "resume": True}
    refused("differ from those that this run began with", model, "clean", data(images.flip(1)), **again)
    refused("differ from those that this run began with", model, "clean", data(images, labels.flip(0)), **again)
    resumed = evaluate(model, "clean", data(images), **again, **QUIET)
    whole = evaluate(model, "clean", data(images), **QUIET)  # in batches of another size, which may round otherwise
    np.testing.assert_allclose(confidence(resumed), confidence(whole), rtol=2e-6)
    assert evaluate(model, "clean", data(images), **again, **QUIET).to_dict() == load_scores(run).to_dict()
    refused("finished run on other data", model, "clean", data(images.flip(1)), **again)


def test_resuming_with_fewer_images_is_refused(tmp_path: Path) -> None:
    images, labels = tensors()
    with pytest.raises(VitfocusError):
        evaluate(Blobs(10), "clean", iter([(images, labels), "power cut"]), out=tmp_path / "run", **QUIET)
    refused(
        "at least 6 images, now 4", Blobs(10), "clean", [(images[:4], labels[:4])], out=tmp_path / "run", resume=True
    )


def test_digest_depends_on_the_order_of_pixels_and_channels() -> None:
    images, labels = tensors()
    whole = evaluate(Blobs(10), "clean", TensorDataset(images, labels), **QUIET)
    for other in (images.flip(1), images.flip(-1)):
        with pytest.raises(VitfocusError, match=r"data\.digest"):
            compare(whole, evaluate(Blobs(10), "clean", TensorDataset(other, labels), **QUIET))
    halves = evaluate(Blobs(10), "clean", [(images.float() / 255, labels)], **QUIET)
    shifted = evaluate(Blobs(10), "clean", [((images.float() + 0.3).clamp(max=255) / 255, labels)], **QUIET)
    digests = [scores.fingerprint["data"]["digest"] for scores in (whole, halves, shifted)]
    assert digests[0] == digests[1] != digests[2]


class Broken(Blobs):
    """NaN where the image is bright."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits.masked_fill((x.flatten(1).amin(1) > 2)[:, None], torch.nan)


def test_nan_is_refused_in_answers_and_in_pixels(tmp_path: Path) -> None:
    images, labels = tensors()
    images[4] = 255
    for suite, options in (("clean", {}), ("imagenet-p", {"perturbations": ["brightness"]})):
        for size in (2, 6):
            refused(
                "blobs returned NaN for image 4",
                Broken(10),
                suite,
                TensorDataset(images, labels),
                batch_size=size,
                **options,
            )
    refused("nan", Blobs(10), "clean", [(torch.full((1, 3, 32, 32), torch.nan), labels[:1])])


def test_model_name_may_contain_any_characters(tmp_path: Path) -> None:
    scores = evaluate({"a|b/c": Blobs(10)}, "clean", [tensors()], out=tmp_path / "run", **QUIET)
    assert np.array_equal(
        load_scores(tmp_path / "run").samples["clean"]["a|b/c"]["top1"], scores.samples["clean"]["a|b/c"]["top1"]
    )


def test_numpy_numbers_and_single_values_are_accepted() -> None:
    model, data = Blobs(10), [tensors()]
    plain = evaluate(model, "imagenet-c", data, corruptions=["shot_noise"], severities=[1, 3], seed=5, limit=4, **QUIET)
    other = evaluate(
        model,
        "imagenet-c",
        data,
        corruptions="shot_noise",
        severities=np.array([3, 1]),
        seed=np.int64(5),
        limit=np.int32(4),
        **QUIET,
    )
    assert list(plain.samples) == list(other.samples) == ["clean", "shot_noise/1", "shot_noise/3"]
    assert np.array_equal(confidence(plain, "shot_noise/3"), confidence(other, "shot_noise/3"))
    assert json.dumps(other.to_dict())
    assert "fgsm/2" in evaluate(model, "fgsm", data, eps=np.array([1.0, 2.0]), **QUIET).samples


def test_a_data_set_of_dicts() -> None:
    images, labels = tensors()
    named = [{"image": image, "label": int(label)} for image, label in zip(images, labels, strict=True)]
    plain = evaluate(Blobs(10), "clean", TensorDataset(images, labels), **QUIET)
    assert np.array_equal(confidence(plain), confidence(evaluate(Blobs(10), "clean", Listed(named), **QUIET)))
    refused("a dict of x, y; expected", Blobs(10), "clean", Listed([{"x": 1, "y": 2}]))
    refused("has the label 'cat'", Blobs(10), "clean", Listed([(images[0], "cat")]))


@pytest.mark.parametrize(
    ("suite", "options", "match"),
    [
        ("clean", {"limit": 2.5}, "limit is 2.5; expected a whole number"),
        ("clean", {"seed": 1.5}, "seed is 1.5"),
        ("clean", {"seed": None}, "seed is None"),
        ("clean", {"workers": -2}, "workers is -2"),
        ("clean", {"batch_size": 0}, "batch_size is 0"),
        ("imagenet-c", {"jpeg_quality": 0}, "jpeg_quality is 0; expected a whole number from 1 to 100"),
        ("imagenet-c", {"jpeg_quality": 300}, "jpeg_quality is 300"),
        ("imagenet-c", {"severities": 6}, "A severity is 6"),
        ("imagenet-c", {"corruptions": []}, "corruptions is empty"),
        ("imagenet-c", {"corruptions": "fogg"}, "did you mean 'fog'"),
        ("imagenet-p", {"difficulty": 0}, "difficulty is 0"),
        ("fgsm", {"eps": "a"}, "eps is 'a'"),
        ("fgsm", {"eps": []}, "eps is empty"),
        ("pgd", {"steps": 0}, "steps is 0"),
        ("pgd", {"step_size": -1}, "step_size is -1"),
        ("occlusion", {"sizes": "a"}, "One of sizes is 'a'"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(suite: str, options: dict[str, Any], match: str) -> None:
    refused(match, Blobs(10), suite, [tensors()], **options)


def test_other_bad_input_is_refused_in_one_sentence(tmp_path: Path) -> None:
    picture = Listed([(Image.fromarray(pictures(1, 50)[0]), 0)])
    refused("crop_pct is 0", Blobs(10), "clean", picture, crop_pct=0)
    refused("evaluate: model is None; expected a torch.Module", None, "clean", picture)
    refused("no images", Blobs(10), "clean", (torch.zeros(0, 3, 50, 50), torch.zeros(0, dtype=torch.int64)))
    refused("There is no file nowhere.png", Blobs(10), "clean", [("nowhere.png", 0)])
    features = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=0)
    refused("has no classifier", features, "clean", picture)
    (tmp_path / "file").write_text("")
    refused("cannot be written", Blobs(10), "clean", picture, out=tmp_path / "file" / "run")
    labels = tmp_path / "real.json"
    labels.write_text(json.dumps([["tench"]] * 50_000))
    with pytest.raises(VitfocusError, match="expected a whole number from 0 to 999"):
        read_real(labels)


def test_labels_of_cifar_may_be_a_column(tmp_path: Path) -> None:
    images = pictures(10)
    np.save(tmp_path / "fog.npy", images)
    for labels in (np.arange(10), np.arange(10)[:, None]):
        np.save(tmp_path / "labels.npy", labels)
        scores = evaluate(Blobs(10), "cifar10-c", tmp_path, corruptions="fog", severities=2, **QUIET)
        assert scores.images == 2
    np.save(tmp_path / "labels.npy", np.zeros((10, 2), dtype=np.int64))
    refused("one whole number per image", Blobs(10), "cifar10-c", tmp_path, corruptions="fog", severities=2)


def test_attacks_work_inside_inference_mode() -> None:
    model: nn.Module = Blobs(10)
    images, labels = tensors()
    outside = evaluate(model, "pgd", [(images, labels)], **QUIET)
    plain = [fgsm(model, images, labels, 4), pgd(model, images, labels, 4)]
    with torch.inference_mode():
        fresh = images.clone()
        assert np.array_equal(
            confidence(outside, "pgd/1"),
            confidence(evaluate(model, "pgd", [(fresh, labels.clone())], **QUIET), "pgd/1"),
        )
        inside = [fgsm(model, fresh, labels.clone(), 4), pgd(model, fresh, labels.clone(), 4)]
    for first, second in zip(plain, inside, strict=True):
        assert torch.equal(first, second)


def test_only_the_first_process_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, _ = write_imagenet(tmp_path / "data", Blobs(1000), count=2)
    run = tmp_path / "run"
    evaluate(Blobs(1000), "clean", root, out=run, **QUIET)
    for rank, speaks in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert main(["evaluate", "--compare", str(run), str(run), "--json"]) == 0
        said = capsys.readouterr().out
        assert bool(said) == speaks
    assert json.loads(said)["suite"] == "clean"
    assert main(["evaluate", "--suite", "list", "--json"]) == 0
    assert "eps" in json.loads(capsys.readouterr().out)["fgsm"]["options"]


def test_labels_are_one_class_index_per_image() -> None:
    model, (images, labels) = Blobs(10), tensors()
    rows = torch.nn.functional.one_hot(labels, 10)
    for wrong in (rows, rows.float(), labels + 0.5):
        refused("one class number per image", model, "clean", [(images, wrong)])
        refused("one class number per image", model, "clean", TensorDataset(images, wrong))
    plain = evaluate(model, "clean", [(images, labels)], **QUIET)["top1"]
    for same in (labels[:, None], labels.double()):
        assert evaluate(model, "clean", [(images, same)], **QUIET)["top1"] == plain
        assert evaluate(model, "clean", TensorDataset(images, same), **QUIET)["top1"] == plain


def test_a_batch_of_another_size_is_refused_at_any_position() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10)
    (small, labels), (large, _) = tensors(), tensors(size=40)
    refused("does not take images of 40x40", model, "clean", [(small, labels), (large, labels)])


def test_finished_run_is_not_overwritten_and_damaged_run_is_reported(tmp_path: Path) -> None:
    model, data = Blobs(10), [tensors()]
    evaluate(model, "clean", data, out=tmp_path / "run", **QUIET)
    (tmp_path / "run" / "samples.npz").write_bytes((tmp_path / "run" / "samples.npz").read_bytes()[:100])
    with pytest.raises(VitfocusError, match=r"samples.npz cannot be read"):
        load_scores(tmp_path / "run")
    before = (tmp_path / "run" / "results.json").read_bytes()
    for suite, one, given in (("occlusion", model, data), ("segmentation", nn.Conv2d(3, 11, 1), "shapes:2")):
        refused("already holds a run", one, suite, given, out=tmp_path / "run")
        refused("expected a folder or a new path", one, suite, given, out=tmp_path / "run" / "results.json")
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    images, labels = tensors()
    for option in ({"crop_pct": 0.5}, {"crop_pct": 0}, {"interpolation": "bilinear"}, {"resize": True}):
        for data in ([(images, labels)], TensorDataset(images, labels)):
            refused("is about resizing images", Blobs(10), "clean", data, **option)
            assert evaluate(Blobs(10), "clean", data, resize=False, **QUIET).images == 6
        refused("is about resizing images", Blobs(10), "cifar10-c", TensorDataset(images, labels), **option)
    for suite in ("segmentation", "detection", "answers"):
        refused("split is about a folder", Blobs(10), suite, "shapes:2", split="test")
    some = {"corruptions": ["fog", "spatter"], "severities": [1], "extra": True}
    scores = evaluate(Blobs(10), "imagenet-c", [(images, labels)], **some, **QUIET)
    assert list(scores["corruptions"]) == ["fog", "spatter", "speckle_noise", "gaussian_blur", "saturate"]


def test_a_data_set_of_other_classes_is_noted() -> None:
    data = Shapes("val", length=4, size=32)
    for classes, noted in ((10, False), (12, True)):
        model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=classes)
        notes = evaluate(model, "clean", data, progress=False).notes
        assert ("The data has 10 classes, but the model 12." in notes) == noted


def test_arrays_of_images_are_taken_like_tensors_in_every_verb() -> None:
    """Channels first, flipped views and foreign byte orders included; arrays of objects are refused in a sentence."""
    import vitfocus as vf

    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=4).eval()
    array = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)[::-1]
    tensor, labels = torch.from_numpy(array.copy()), [0, 1, 2]
    expected = confidence(evaluate(model, "clean", (tensor, labels), **QUIET))
    assert np.array_equal(confidence(evaluate(model, "clean", (array, labels), **QUIET)), expected)
    assert vf.diagnose(model, array).rows == vf.diagnose(model, tensor).rows
    foreign = (array / 255).astype(">f4")
    assert np.allclose(vf.corrupt(foreign, "fog", 2), vf.corrupt(array, "fog", 2) / 255, atol=1 / 255)
    objects = np.array([object()])
    for verb in (vf.corrupt, lambda x, *_: vf.diagnose(model, x), lambda x, *_: evaluate(model, "clean", (x, [0]))):
        with pytest.raises(VitfocusError, match="An array of object is not a set of images"):
            verb(objects, "fog", 2)
    with pytest.raises(VitfocusError, match="whose keys are names of tensors"):
        vf.treat_(model, {1: 2})
