"""Readings by layer are logged at every evaluation of every task, and a collapse of attention is said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.train_tools import rows

from vitfocus.train import load_recipe, train
from vitfocus.train.log import AttentionLog, collapsed_layers

TASKS = {
    "shapes": ["model.arguments={patch_size=8,embed_dim=24,depth=2,num_heads=2}", "size=16"],
    "shapes_segment": [
        "model.arguments={img_size=32,patch_size=8,embed_dim=24,depth=4,num_heads=2,channels=8,auxiliary_channels=4}",
        "size=32",
    ],
    "shapes_detect": [
        "model.arguments={embed_dim=24,depth=4,num_heads=2,channels=8,box_width=16,"
        "rpn_post_nms_top_n_train=20,rpn_post_nms_top_n_test=20,box_detections_per_img=4}",
        "size=32",
    ],
    "shapes_answer": ["model.arguments={hidden_size=24,num_hidden_layers=1}", "size=32"],
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_logs_a_row_at_every_evaluation(name: str, tmp_path: Path) -> None:
    always = ["train_length=8", "val_length=8", "batch=4", "epochs=2", "warmup_epochs=0", "evaluate_every=1"]
    results = train(load_recipe(name, [*TASKS[name], *always, "device=cpu", "workers=0"]), tmp_path)
    logged, evaluated = rows(tmp_path, "attention"), rows(tmp_path, "eval")
    assert [row["step"] for row in logged] == [row["step"] for row in evaluated] and len(logged) == 2
    for row in logged:
        assert row["layer"] and len(row["layer"]) == len(row["entropy"]) == len(row["overfocus"])
        assert all(0 < share <= 1 for share in row["entropy_share"]) and all(0 < top <= 1 for top in row["overfocus"])
    assert "entropy" not in results["last"]


def test_a_model_without_attention_logs_none(tmp_path: Path) -> None:
    keys = ["spec=resnet10t", "model.arguments={}", "size=32", "train_length=4", "val_length=4", "batch=4", "epochs=1"]
    train(load_recipe("shapes", [*keys, "warmup_epochs=0", "device=cpu"]), tmp_path)
    assert rows(tmp_path, "attention") == [] and len(rows(tmp_path, "eval")) == 1


class Images:
    """A task that has nothing but images."""

    def sample_images(self, count: int) -> torch.Tensor:
        return torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_readings_are_those_of_a_diagnosis_and_a_collapse_is_said_once() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2)
    task: Any = Images()
    log = AttentionLog(task, model)
    healthy = log.row(model, 1, 1.0)
    assert healthy is not None and collapsed_layers(healthy) == [] and log.sentence(healthy, 1.0) == ""
    with torch.no_grad():
        for block in model.blocks:  # every query agrees with one direction of the keys, strongly
            block.attn.qkv.weight[192:384] *= 60
            block.attn.qkv.bias[:192] += 20
    narrow = log.row(model, 2, 2.0)
    assert narrow is not None and collapsed_layers(narrow) == [0, 1]
    said = log.sentence(narrow, 1.0)
    assert said.startswith("Attention has collapsed in 2 of 2 layers (0–1): its entropy is")
    assert "lower optimiser.lr" in said
    assert log.sentence(narrow, 1.0).startswith("Attention has stopped changing")  # it changed, and now does not
    assert log.sentence(narrow, 1.0) == ""


@pytest.mark.parametrize(("rate", "said"), [(0.5, True), (0.05, False)])
def test_attention_that_stops_changing_is_said_while_the_learning_rate_is_high(rate: float, said: bool) -> None:
    task: Any = None
    log = AttentionLog(task, torch.nn.Linear(1, 1))
    told = [log.sentence({"layer": [0], "entropy_share": [v], "overfocus": [0.1]}, rate) for v in (0.9, 0.8, 0.801)]
    assert told[:2] == ["", ""] and bool(told[2]) == said
    never_moved = AttentionLog(task, torch.nn.Linear(1, 1))
    assert [never_moved.sentence({"layer": [0], "entropy_share": [1.0], "overfocus": [0.1]}, 1) for _ in "abc"] == [
        ""
    ] * 3
