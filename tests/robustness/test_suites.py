"""Every suite on a tiny copy of its published layout, against accuracies computed by hand."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.robustness_layouts import Blobs, answers, as_input, half_right, pictures, write_classes, write_imagenet
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import vitfocus
from vitfocus.cli import main
from vitfocus.core.errors import VitfocusError
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from vitfocus.robustness import SUITES, evaluate
from vitfocus.robustness.batches import EvaluationBatch
from vitfocus.robustness.classification import (
    CLEAN,
    classification_plan,
    classify,
    num_classes,
    open_labelled_images,
    wordnet_ids,
)
from vitfocus.robustness.engine import Condition, EvaluationArguments, EvaluationPlan, Group
from vitfocus.robustness.metrics import condition_summary
from vitfocus.robustness.suites import ClassFolderOptions, Option, Suite, SuiteOptions, switches

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
MOST_FILES = 29


def channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def test_clean_maps_wordnet_folders_to_classes(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, images, labels = write_imagenet(tmp_path / "val", model)
    scores = evaluate(model, "clean", root, **QUIET)
    with torch.no_grad():
        logits = model(as_input(images))
    top5 = (logits.topk(5).indices == torch.from_numpy(labels)[:, None]).any(1)
    assert scores["top1"] == 50 and scores["top5"] == pytest.approx(100 * float(top5.float().mean()))
    assert scores.images == 12 and any("of ImageNet's 1,000 classes" in note for note in scores.notes)
    assert scores.to_dict()["models"]["blobs"]["top1"] == 50
    text = str(scores.table())
    assert "top-1" in text and "50.00" in text


def test_an_index_file_names_the_classes_of_other_folders(tmp_path: Path) -> None:
    model = Blobs(1000)
    images = pictures(4)
    labels = answers(model, images)
    write_classes(tmp_path / "data", images, [f"class {label}" for label in labels])
    index = tmp_path / "index.json"
    index.write_text(json.dumps({str(i): [f"class {i}", "name"] for i in range(1000)}))
    assert evaluate(model, "clean", tmp_path / "data", index=index, **QUIET)["top1"] == 100
    with pytest.raises(VitfocusError, match="not in ImageNet: class"):
        evaluate(model, "clean", tmp_path / "data", **QUIET)


def test_folders_of_other_data_are_classes_in_sorted_order(tmp_path: Path) -> None:
    from vitfocus.data.shapes.dataset import CLASSES
    from vitfocus.data.shapes.layouts import write_layout

    root = write_layout(tmp_path / "shapes", "imagefolder", 60, val_count=40, size=32)
    model = Blobs(len(CLASSES))
    scores = evaluate(model, "clean", root, **QUIET)
    expected = []
    for label, name in enumerate(sorted(CLASSES)):
        for file in (root / "val" / name).iterdir():
            expected.append(answers(model, np.array(Image.open(file))[None])[0] == label)
    assert scores.images == 40 and scores["top1"] == pytest.approx(100 * np.mean(expected))


def test_large_pictures_are_resized_and_cropped(tmp_path: Path) -> None:
    model = Blobs(10, size=32)
    images = pictures(10, 61)
    write_classes(tmp_path, images, [f"{label}" for label in range(10)])
    scores = evaluate(model, "clean", tmp_path, **QUIET)
    hits = []
    for label, image in enumerate(images):
        small = Image.fromarray(image).resize((36, 36), Image.Resampling.BILINEAR).crop((2, 2, 34, 34))
        hits.append(answers(model, np.array(small)[None])[0] == label)
    assert scores["top1"] == pytest.approx(100 * np.mean(hits))
    assert scores.fingerprint["protocol"]["preprocessing"] == {
        "resize": 36,
        "crop": (32, 32),
        "interpolation": "bilinear",
        "keep": (32, 32),
    }


def test_generated_imagenet_c_equals_its_own_images_written_and_read(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, images, labels = write_imagenet(tmp_path / "val", model, count=6)
    chosen = {"corruptions": ["gaussian_noise", "fog"], "severities": [1, 4]}
    generated = evaluate(model, "imagenet-c", root, seed=3, **chosen, **QUIET)
    names = [f"{wordnet_ids()[label]}/{index:08d}.png" for index, label in enumerate(labels)]
    for name in chosen["corruptions"]:
        for severity in chosen["severities"]:
            worse = corrupt(channels_first(images), name, severity, seed=3, ids=names).permute(0, 2, 3, 1).numpy()
            folder = tmp_path / "c" / ("noise" if "noise" in name else "weather") / name / str(severity)
            write_classes(folder, worse, [file.split("/")[0] for file in names])
    published = evaluate(model, "imagenet-c", tmp_path / "c", seed=3, **chosen, clean_data=root, **QUIET)
    with pytest.raises(VitfocusError, match="jpeg_quality is for generated corruptions"):
        evaluate(model, "imagenet-c", tmp_path / "c", **chosen, jpeg_quality=85, **QUIET)
    with pytest.raises(VitfocusError, match="clean_data is for published files"):
        evaluate(model, "imagenet-c", root, **chosen, clean_data=root, **QUIET)
    assert "generated on the fly" in generated.notes[0] and "published files" in published.notes[0]
    for cell, models in published.samples.items():
        assert np.array_equal(models["blobs"]["prediction"], generated.samples[cell]["blobs"]["prediction"]), cell
    larger = evaluate(Blobs(1000, size=40), "imagenet-c", tmp_path / "c", **chosen, **QUIET)
    assert any("have 32x32 pixels; they are scaled" in note for note in larger.notes)
    assert generated["clean"] == published["clean"] and "mce" not in generated.models["blobs"]


def test_complete_generated_imagenet_c_with_several_models(tmp_path: Path) -> None:
    first, second = Blobs(1000, seed=0), Blobs(1000, seed=1)
    root, _, _ = write_imagenet(tmp_path / "val", first, count=4)
    first.calls = 0
    scores = evaluate({"a": first, "b": second}, "imagenet-c", root, extra=True, **QUIET)
    summary = scores["a"]
    assert list(summary["corruptions"]) == [*CORRUPTIONS, *EXTRA_CORRUPTIONS]
    assert {"mce", "mce_interval", "relative_mce", "mean_error", "top1", "ece"} <= set(summary)
    assert summary["mce"] == pytest.approx(np.mean([summary["corruptions"][name]["ce"] for name in CORRUPTIONS]))
    assert first.calls == second.calls == 1 + 1 + 95  # the trial image, the clean batch, every condition once
    alone = evaluate(second, "imagenet-c", root, corruptions=["snow"], **QUIET)
    assert alone["snow"]["ce"] == scores["b"]["corruptions"]["snow"]["ce"]
    comparison = scores.compare("a", "b")
    assert comparison.rows[-1]["name"] == "mCE"
    assert comparison.rows[-1]["difference"] == pytest.approx(scores["b"]["mce"] - summary["mce"])
    assert "mCE" in str(scores.table())


def test_saving_as_jpeg_after_corrupting_changes_the_images(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path / "val", model, count=4)
    some = {"corruptions": ["impulse_noise"], "severities": [5], **QUIET}
    plain, saved = (evaluate(model, "imagenet-c", root, jpeg_quality=quality, **some) for quality in (None, 20))
    key = ("impulse_noise/5", "blobs", "confidence")
    assert not np.array_equal(*(scores.samples[key[0]][key[1]][key[2]] for scores in (plain, saved)))


@pytest.mark.parametrize("suite", ["imagenet-a", "imagenet-r"])
def test_a_and_r_mask_to_their_200_classes(suite: str, tmp_path: Path) -> None:
    model = Blobs(1000)
    images = pictures(10)
    kept = [wordnet_ids().index(name) for name in wordnet_ids(suite.replace("-", "_"))]
    with torch.no_grad():
        best = model(as_input(images))[:, kept].argmax(1).numpy()
    best[::2] = (best[::2] + 1) % 200
    names = [wordnet_ids()[kept[place]] for place in best]
    scores = evaluate(model, suite, write_classes(tmp_path, images, names), **QUIET)
    assert scores["top1"] == 50 and scores.fingerprint["protocol"]["masked_to"] == 200
    assert any("200 classes are used" in note for note in scores.notes) and any("a subset" in n for n in scores.notes)
    write_classes(tmp_path, images[:1], [next(name for name in wordnet_ids() if wordnet_ids().index(name) not in kept)])
    with pytest.raises(VitfocusError, match=f"not one of {suite}'s 200 classes"):
        evaluate(model, suite, tmp_path, **QUIET)
    with pytest.raises(VitfocusError, match="classes, not 7"):
        evaluate(Blobs(7), suite, tmp_path, **QUIET)


def test_v2_reads_numbered_folders_of_three_sets(tmp_path: Path) -> None:
    model = Blobs(1000)
    images = pictures(6)
    labels = half_right(model, images, 1000)
    for name in ("matched-frequency", "threshold0.7", "topimages"):
        write_classes(tmp_path / f"imagenetv2-{name}-format-val", images, [str(label) for label in labels])
    scores = evaluate(model, "imagenet-v2", tmp_path, **QUIET)
    assert list(scores.models["blobs"]["cells"]) == ["matched-frequency", "threshold0.7", "topimages"]
    assert scores["topimages"]["top1"] == 50
    single = evaluate(model, "imagenet-v2", tmp_path / "imagenetv2-topimages-format-val", **QUIET)
    assert single["top1"] == 50
    write_classes(tmp_path / "imagenetv2-topimages-format-val", images[:1], ["n01440764"])
    with pytest.raises(VitfocusError, match="numbered 0 to 999"):
        evaluate(model, "imagenet-v2", tmp_path, **QUIET)


def test_real_counts_any_label_and_leaves_out_images_without_one(tmp_path: Path) -> None:
    model = Blobs(1000)
    images = pictures(6)
    said = answers(model, images)
    real: list[list[int]] = [[] for _ in range(50_000)]
    for index in range(6):
        wrong = int(said[index] + 1) % 1000
        real[index] = [[], [wrong, int(said[index])], [int(said[index])], [wrong], [wrong], []][index]
    for index, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"ILSVRC2012_val_{index + 1:08d}.png")
    labels = tmp_path / "real.json"
    labels.write_text(json.dumps(real))
    scores = evaluate(model, "imagenet-real", tmp_path, labels=labels, **QUIET)
    assert (
        scores.images == 4
        and scores["top1"] == 50
        and any("2 of 6 images have no label" in note for note in scores.notes)
    )
    assert evaluate(model, "imagenet-real", tmp_path, **QUIET).images <= 6  # timm's own copy of ReaL
    labels.write_text(json.dumps(real[:-1]))
    with pytest.raises(VitfocusError, match="holds 49999 entries; ReaL has 50,000"):
        evaluate(model, "imagenet-real", tmp_path, labels=labels, **QUIET)
    Image.fromarray(images[0]).save(tmp_path / "holiday.png")
    with pytest.raises(VitfocusError, match="not named as a validation photograph"):
        evaluate(model, "imagenet-real", tmp_path, **QUIET)


def test_sketch(tmp_path: Path) -> None:
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path, model)
    assert evaluate(model, "imagenet-sketch", root, limit=6, **QUIET).images == 6


def test_cifar_c_from_arrays_and_on_the_fly(tmp_path: Path) -> None:
    model = Blobs(10, size=32)
    images = pictures(6)
    labels = half_right(model, images, 10)
    np.save(tmp_path / "labels.npy", np.tile(labels, 5))
    for name in CORRUPTIONS:
        worse = [corrupt(channels_first(images), name, s, seed=0, ids=range(6), flavour="cifar") for s in range(1, 6)]
        np.save(tmp_path / f"{name}.npy", torch.cat(worse).permute(0, 2, 3, 1).numpy())
    published = evaluate(model, "cifar10-c", tmp_path, **QUIET)
    loader = DataLoader(TensorDataset(channels_first(images), torch.from_numpy(labels)), batch_size=4)
    generated = evaluate(model, "cifar10-c", loader, **QUIET)
    for cell, models in published.samples.items():
        assert np.array_equal(models["blobs"]["prediction"], generated.samples[cell]["blobs"]["prediction"]), cell
    assert published["mean_error"] == pytest.approx(generated["mean_error"]) and "mce" not in published.models["blobs"]
    assert generated["clean"]["top1"] == 50
    larger = evaluate(Blobs(10, size=64), "cifar10-c", tmp_path, corruptions=["fog"], **QUIET)
    assert any("enlarged" in note for note in larger.notes)
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(VitfocusError, match=r"labels\.npy holds 6 labels, but gaussian_noise\.npy 30 images"):
        evaluate(model, "cifar10-c", tmp_path, **QUIET)
    (tmp_path / "fog.npy").unlink()
    with pytest.raises(VitfocusError, match=r"lacks fog\.npy"):
        evaluate(model, "cifar10-c", tmp_path, **QUIET)
    with pytest.raises(VitfocusError, match="100 classes, not 10"):
        evaluate(model, "cifar100-c", tmp_path, **QUIET)


def documented_options() -> dict[str, str]:
    """The options of each suite in the table of the documentation."""
    text = (Path(__file__).parents[2] / "docs/robustness.md").read_text().partition("| suite | data |")[2]
    rows = [line.split("|")[1:-1] for line in text.partition("\n\n")[0].splitlines()[2:]]
    return {name.strip(" `"): options.strip() for names, _, options, _ in rows for name in names.split(",")}


def _described(option: Option) -> str:
    """The name and the default, where there is one to name."""
    if option.type not in (bool, int, float, str):
        return f"`{option.name}` (Python only)"
    default = option.default
    if isinstance(default, bool) or default in (None, ""):
        return f"`{option.name}`"
    return f"`{option.name}` ({', '.join(f'{one}' for one in default) if option.several else default})"


def test_the_documentation_lists_every_suite_with_its_options() -> None:
    common = {one.name for one in dataclasses.fields(ClassFolderOptions)}  # explained once, below the table
    assert documented_options() == {
        name: ", ".join(_described(option) for option in suite.option_list if option.name not in common)
        for name, suite in SUITES.items()
    }
    with pytest.raises(VitfocusError, match="did you mean 'imagenet-c'"):
        evaluate(Blobs(5), "imagenetc", None)
    with pytest.raises(VitfocusError, match="no option 'severity': did you mean 'severities'"):
        evaluate(Blobs(5), "imagenet-c", None, severity=3)


def test_new_suite_needs_only_a_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Options(SuiteOptions):
        margin: int = dataclasses.field(default=3, metadata={"help": "pixels", "negate": False})

    def plan(arguments: EvaluationArguments) -> EvaluationPlan:
        def change(batch: EvaluationBatch) -> torch.Tensor:
            return batch.images.roll(arguments.options.margin, -1)

        images = open_labelled_images(arguments, num_classes(arguments))
        group = Group("shifted", images.source, (CLEAN, Condition("shifted", classify, change)))
        return classification_plan(arguments, [group], 10, {}, condition_summary, ["Shifted."])

    module = types.ModuleType("vitfocus.robustness.suites.shifts")
    module.plan = plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = Suite("shifts", "shifted images", "shifts:plan", Options)
    monkeypatch.setitem(SUITES, "shifts", record)
    model, images = Blobs(10), pictures(6)
    labels = torch.from_numpy(answers(model, images))
    data = [(torch.from_numpy(images).permute(0, 3, 1, 2), labels)]
    scores = evaluate(model, "shifts", data, margin=32, **QUIET)  # once around
    assert scores["clean"]["top1"] == scores["shifted"]["top1"] == 100 and scores.notes == ("Shifted.",)
    assert "margin" in switches()
    assert main(["evaluate", "--suite", "list"]) == 0 and "shifted images" in capsys.readouterr().out
    with pytest.raises(VitfocusError, match="no option 'margins': did you mean 'margin'"):
        evaluate(model, "shifts", data, margins=3, **QUIET)


def test_one_condition_passes_few_files(tmp_path: Path) -> None:
    """From the call to the scores: a reader who follows one condition opens no more files than these."""
    model = Blobs(1000)
    root, _, _ = write_imagenet(tmp_path, model, count=4)
    one: dict[str, Any] = {"corruptions": ["gaussian_noise"], "severities": [3], **QUIET}
    evaluate(model, "imagenet-c", root, **one)  # imports and caches
    seen: set[str] = set()
    before = sys.getprofile()
    source = str(Path(vitfocus.__file__).parent)

    def watch(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(source):
            seen.add(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        evaluate(model, "imagenet-c", root, **one)
    finally:
        sys.setprofile(before)
    assert 10 < len(seen) <= MOST_FILES, sorted(Path(name).relative_to(source).as_posix() for name in seen)
