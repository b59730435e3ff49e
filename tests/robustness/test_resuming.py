"""Detection and answers: interrupted runs that are resumed, and several processes, give the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import run_in_two_processes
from torch import nn

import vitfocus as vf
from vitfocus.data.shapes.layouts import write_layout
from vitfocus.data.vqa.dataset import QuestionTokenizer, attach_tokenizer
from vitfocus.robustness import load_scores
from vitfocus.robustness.run_folder import differences

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("faster_coco_eval", reason="the det extra is not installed")

LIMIT, BATCH = 10, 3  # four batches a model, the last of one item


def detector(seed: int, classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    small = {"depth": 4, "embed_dim": 16, "num_heads": 2, "channels": 8, "box_width": 16, "mask_layers": 1}
    few = {"box_detections_per_img": 5, "min_size": 32}
    return vf.create_model("maskrcnn:vit_tiny_patch16_224", num_classes=classes, **small, **few)


def answerer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    words = QuestionTokenizer.train(
        ["Is there a star?", "How many rings are there?", "What is left of the red cross?"], size=90
    )
    names = ["no", "yes", *map(str, range(10)), "red", "blue", "star", "ring"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"image_size": 32, "patch_size": 8, "vocab_size": len(words), "initializer_range": 1.0}
    model = vf.create_model("transformers:ViltForQuestionAnswering", **labels, **small, **sizes)
    attach_tokenizer(model, words)
    return model


MODELS = {"detection": detector, "answers": answerer}


class Calls:
    """Two models that are counted whenever they are asked, and give up after so many times.

    What they see of a picture depends strongly on the others of its batch, as padding makes it depend a little, and on
    chance where it does in truth: ViLT shuffles the patches.
    """

    def __init__(self, suite: str, answers: int = 1000) -> None:
        self.suite, self.count, self.answers = suite, 0, answers
        self.models = {name: MODELS[suite](seed) for seed, name in enumerate("ab")}
        for model in self.models.values():
            model.register_forward_pre_hook(self.ask, with_kwargs=True)

    def ask(
        self, _: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.count == self.answers:
            raise KeyboardInterrupt
        self.count += 1
        if self.suite == "answers":
            pixels = inputs["pixel_values"]
            return args, {**inputs, "pixel_values": pixels + 50 * pixels.mean() + 5 * torch.randn(3, 1, 1)}
        common = torch.stack([picture.mean() for picture in args[0]]).mean()
        return ([picture + 50 * common for picture in args[0]],), inputs

    def run(self, data: Path, out: Path, **more: Any) -> vf.Scores:
        options = {"batch_size": BATCH, "limit": LIMIT, "device": "cpu", "progress": False} | more
        return vf.evaluate(self.models, self.suite, data, out=out, **options)


def found(suite: str, out: Path) -> list[str]:
    """All that the two models said, to the last digit."""
    texts = [(out / f"{suite.replace('detection', 'detections')}-{number}.json").read_text() for number in (0, 1)]
    for text in texts:
        said = [one.get("answer") or one["bbox"] for one in json.loads(text)]
        assert len(said) >= LIMIT and len(set(map(str, said))) > 1
    return texts


def layout(suite: str, folder: Path, size: tuple[int, int] = (32, 40)) -> Path:
    return write_layout(folder, {"detection": "coco", "answers": "vqav2"}[suite], 4, val_count=12, size=size)


@pytest.mark.parametrize("suite", MODELS)
def test_an_interrupted_run_resumes(suite: str, tmp_path: Path) -> None:
    data, other = layout(suite, tmp_path / "data"), layout(suite, tmp_path / "other", (40, 32))
    counting = Calls(suite)
    whole = counting.run(data, tmp_path / "whole")
    assert counting.count == 8
    for stop in (2, 5):  # between two batches, and between the two models on one
        out = tmp_path / f"stopped-{stop}"
        drawn: dict[str, Any] = {"pictures": out / "drawn"} if suite == "detection" else {}
        with pytest.raises(KeyboardInterrupt):
            Calls(suite, stop).run(data, out, **drawn)
        for said, where, changed in (
            ("already holds a run", data, {}),
            (r"another run.*data\.digest", other, {"resume": True}),
            (r"another run.*data\.limit", data, {"resume": True, "limit": 9}),
        ):
            with pytest.raises(vf.VitfocusError, match=said):
                Calls(suite, 0).run(where, out, **drawn | changed)
        strange = Calls(suite, 0)
        next(strange.models["b"].parameters()).data += 1
        with pytest.raises(vf.VitfocusError, match=r"another run.*models\.b\.digest"):
            strange.run(data, out, resume=True, **drawn)
        rest = Calls(suite)
        assert rest.run(data, out, resume=True, **drawn).models == whole.models
        assert rest.count == 8 - stop // 2 * 2
        assert found(suite, out) == found(suite, tmp_path / "whole") and not (out / "parts").exists()
        assert all(len(list(out.glob(f"drawn-{number}/*.png"))) == LIMIT for number in (0, 1) if drawn)
        (out / "parts").mkdir()
        (out / "parts" / ".vitfocus-left").touch()  # by a run that was killed when it dropped its parts
        again = Calls(suite, 0).run(data, out, resume=True, **drawn)  # finished: nothing is asked any more
        assert not (out / "parts").exists()
        assert again.to_dict() == load_scores(out).to_dict() and again.models == whole.models
        with pytest.raises(vf.VitfocusError, match=r"another run.*data\.digest"):
            Calls(suite, 0).run(other, out, resume=True, **drawn)
    with pytest.raises(vf.VitfocusError, match="Resuming needs"):
        vf.evaluate(counting.models, suite, data, resume=True, progress=False)


@pytest.mark.parametrize("suite", MODELS)
def test_another_batch_size_measures_only_what_is_missing(suite: str, tmp_path: Path) -> None:
    data, out = layout(suite, tmp_path / "data"), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Calls(suite, 4).run(data, out)  # two batches of three
    before = [dict(np.load(part)) for part in (out / "parts").iterdir()]
    assert sorted(int(place) for part in before for place in part["positions"]) == list(range(6))
    rest = Calls(suite)
    scores = rest.run(data, out, resume=True, batch_size=6)
    assert rest.count == 2 and scores.images == LIMIT  # the last four, by both models
    Calls(suite).run(data, tmp_path / "whole")
    said, expected = (json.loads(found(suite, run)[0]) for run in (out, tmp_path / "whole"))
    if suite == "answers":  # what was measured before stands, whatever batches the others come in
        assert said[:6] == expected[:6] and len(said) == len(expected)


def test_a_run_that_fails_early_releases_its_folder(tmp_path: Path) -> None:
    with pytest.raises(vf.VitfocusError, match="has 3 classes"):
        vf.evaluate(detector(0, 3), "detection", "shapes:2", out=tmp_path, progress=False)
    with pytest.raises(vf.VitfocusError, match="does not name the answers"):
        vf.evaluate(detector(0), "answers", "shapes:2", out=tmp_path, progress=False)
    assert vf.evaluate(detector(0), "detection", "shapes:2", out=tmp_path, progress=False).images == 2


SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/robustness"]
from test_resuming import Calls
from vitfocus.robustness import engine

work = Path({work!r})
for suite in ("answers", "detection"):
    shared = Calls(suite)
    shared.run(work / suite, work / f"{{suite}}-together")
    assert shared.count == 4, "two batches of each model"

def die(*_):
    if calls.count > 1:  # when both processes have kept a batch
        parts, until = work / "killed" / "parts", time.monotonic() + 60
        while len(list(parts.glob("detection.*.npz"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0)

engine.SAVE_EVERY = 0.0
calls = Calls("detection")
calls.models["a"].register_forward_pre_hook(die)
calls.run(work / "detection", work / "killed")
"""


def test_two_processes_share_the_work_and_one_resumes_after_both_were_killed(tmp_path: Path) -> None:
    for suite in MODELS:
        layout(suite, tmp_path / suite)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), work=str(tmp_path)))
    run_in_two_processes(script)
    for suite in MODELS:
        alone, together = Calls(suite).run(tmp_path / suite, tmp_path / "alone" / suite), f"{suite}-together"
        shared = load_scores(tmp_path / together)
        assert shared.models == alone.models
        assert differences(shared.fingerprint, alone.fingerprint) == ["environment.processes (2 | 1)"]
        assert found(suite, tmp_path / together) == found(suite, tmp_path / "alone" / suite)
        assert not (tmp_path / together / "parts").exists()
    rest = Calls("detection")
    rest.run(tmp_path / "detection", tmp_path / "killed", resume=True)
    assert rest.count == 8 - 4
    assert found("detection", tmp_path / "killed") == found("detection", tmp_path / "alone" / "detection")
