"""The engine: the same weights as a loop written by hand, and each option by what it must change and must not."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from helpers.train_tools import AUGMENTED, rows, tiny
from safetensors.torch import load_file, save_file
from timm.scheduler import CosineLRScheduler
from torch import nn

import vitfocus as vf
from vitfocus.core.errors import VitfocusError
from vitfocus.data.classification.augmentation import ClassificationBatch
from vitfocus.data.loader import SampleOrder
from vitfocus.data.shapes.dataset import shapes_batch
from vitfocus.recipes import Distill, Optimiser
from vitfocus.robustness.pixel_model import PixelModel
from vitfocus.tasks.base import build_model, model_arguments
from vitfocus.tasks.classification import Teacher, cross_entropy, supervised_terms
from vitfocus.train.optimiser import TrainingSchedule, create_optimiser
from vitfocus.train.recipe import load_recipe
from vitfocus.train.run import assemble_run, train
from vitfocus.treatments.surgery import added_names

SPEC = "vit_tiny_patch16_224"
PLAIN = ["augment.crop=none", "flip=0.0"]


def weights(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / name / "model.safetensors")


def test_the_engine_ends_where_a_loop_by_hand_ends(tmp_path: Path) -> None:
    """Plain torch: AdamW with no decay on vectors, timm's cosine, clipping, smoothing, a moving average."""
    recipe = tiny(*PLAIN, "clip=0.5", "smoothing=0.1", "ema=0.8", "min_lr=1e-4", "lr=2e-3", "lr_batch=32")
    results = train(recipe, tmp_path)

    torch.manual_seed(0)
    model = vf.create_model(SPEC, num_classes=10, img_size=16, **recipe.model.arguments).train()
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not model.pos_embed and p is not model.cls_token]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimiser = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}], 1e-3, weight_decay=0.05
    )
    schedule = CosineLRScheduler(
        optimiser, 11 - 3, lr_min=1e-4, warmup_t=3, warmup_lr_init=1e-6, warmup_prefix=True, t_in_epochs=False
    )
    average = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = shapes_batch(range(88), size=16)
    stream = SampleOrder(88, 16)
    for step in range(11):
        schedule.step_update(step)
        index = stream.indices(16 * step, 16 * step + 16)
        loss = F.cross_entropy(model(images[index] / 127.5 - 1), labels[index], label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
        for name, value in model.state_dict().items():
            average[name] = 0.8 * average[name] + 0.2 * value
        assert rows(tmp_path)[step]["loss"] == pytest.approx(float(loss.detach()), abs=2e-5)
    for name, value in weights(tmp_path).items():
        torch.testing.assert_close(value, average[name], atol=2e-5, rtol=1e-3)
    model.eval()
    images, labels = shapes_batch(range(20), "val", size=16)
    with torch.no_grad():
        right = (model(images / 127.5 - 1).argmax(1) == labels).float().mean()
    assert results["last"]["top1_raw"] == pytest.approx(float(right)) and "top1" in results["last"]


def test_patchwise_augmentation_is_a_pass_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes give gradients, twice the same here; the attention loss belongs to the second."""
    monkeypatch.setattr("vitfocus.tasks.classification.augment_patches", lambda images, *_: images)
    spec, steps = f"spec={SPEC}+adl(threshold=0.5)", ["epochs=0.19", "warmup_epochs=0"]
    trainers = [assemble_run(tiny(*PLAIN, *steps, spec, *more), tmp_path) for more in ([], ["patchwise=8"])]
    gradients = []
    for trainer in trainers:
        batches = trainer.start(1)
        monkeypatch.setattr(trainer.optimiser, "zero_grad", lambda *_, **__: None)
        trainer.train_step(batches)
        gradients.append(
            {name: p.grad.clone() for name, p in trainer.unwrapped.named_parameters() if p.grad is not None}
        )
        batches.close()
    assert trainers[1].task.names == ["ce", "adl", "patchwise"]
    plain, both = (trainer._loss_sums.tolist() for trainer in trainers)
    assert both[2] == pytest.approx(plain[0], rel=1e-5) and both[:2] == pytest.approx(plain, rel=1e-5) and plain[1] > 0
    head = "head.bias"  # the attention loss has no gradient there
    torch.testing.assert_close(gradients[1][head], 2 * gradients[0][head])
    assert not torch.allclose(gradients[1]["blocks.0.attn.qkv.weight"], 2 * gradients[0]["blocks.0.attn.qkv.weight"])
    with pytest.raises(VitfocusError, match=r"augment\.patchwise=5 does not divide images of 16 pixels"):
        assemble_run(tiny("patchwise=5"), tmp_path)


def test_small_images_are_enlarged_when_augmented_and_mixed(tmp_path: Path) -> None:
    results = train(tiny("enlarge=32", *AUGMENTED), tmp_path / "run")
    small, large = (assemble_run(tiny(key, *AUGMENTED), tmp_path / key).task for key in ("enlarge=0", "enlarge=32"))
    before, after = (next(task.iterate(3, 4)) for task in (small, large))
    expected = F.interpolate(before.images, size=(32, 32), mode="bicubic", antialias=True)
    torch.testing.assert_close(after.images, expected)
    assert torch.equal(after.other_labels, before.other_labels) and before.images.shape[-1] == 16
    model = vf.load(tmp_path / "run" / "model")
    images, labels = shapes_batch(range(20), "val", size=16)
    with torch.no_grad():
        right = PixelModel("model", model, resize=True)(images).argmax(1) == labels
    assert results["last"]["top1"] == pytest.approx(float(right.float().mean()))
    assert vf.anatomy(model).build_size == (32, 32) and results["preprocessing"]["size"] == 32
    with pytest.raises(VitfocusError, match="kept on the device"):
        train(tiny("enlarge=32", "resident=no"), tmp_path / "read")


@pytest.mark.parametrize("what", ["added", "head"])
def test_a_frozen_trunk_does_not_move(what: str, tmp_path: Path) -> None:
    recipe = tiny("spec=vit_tiny_patch16_224+cbs+tap(init=near_identity)", f"optimiser.train={what}", "epochs=1")
    model = build_model(recipe, model_arguments(recipe, 10))
    before, added = model.state_dict(), added_names(model)
    train(recipe, tmp_path)
    moved = {name for name, value in weights(tmp_path).items() if not torch.equal(value, before[name])}
    assert len(moved & added) > 4
    assert moved - added == ({"head.weight", "head.bias"} if what == "head" else set())
    with pytest.raises(VitfocusError, match="leaves nothing to train"):
        train(tiny("spec=vit_tiny_patch16_224+cb", "optimiser.train=added"), tmp_path / "cb")


def test_layer_decay_starts_from_given_weights_with_another_head(tmp_path: Path) -> None:
    """With a rate that decays to nothing below the last layers, the first ones stay as the file has them."""
    torch.manual_seed(1)
    arguments = tiny().model.arguments
    other = timm.create_model(SPEC, num_classes=7, img_size=16, **arguments)
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    recipe = tiny(f"model.weights={tmp_path / 'other.safetensors'}", "layer_decay=0.01", "epochs=1", "weight_decay=0")
    train(recipe, tmp_path / "run")
    after, before = weights(tmp_path / "run"), other.state_dict()
    change = {name: float((after[name] - before[name]).abs().max()) for name in before if "head" not in name}
    assert after["head.weight"].shape[0] == 10
    assert change["patch_embed.proj.weight"] < 1e-3 * change["blocks.1.mlp.fc2.weight"]


def test_hard_distillation_is_deits(tmp_path: Path) -> None:
    arguments = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 16}
    torch.manual_seed(0)
    teacher_net = timm.create_model("resnet10t", num_classes=10)
    save_file(teacher_net.state_dict(), tmp_path / "teacher.safetensors")
    section = Distill(teacher="resnet10t", weights=str(tmp_path / "teacher.safetensors"), weight=0.3)
    teacher = Teacher(section, 10, (0.5,) * 3, (0.5,) * 3)
    student = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10, **arguments).train()
    student.set_distilled_training(True)
    images, labels = torch.randn(6, 3, 16, 16), torch.arange(6)
    batch = ClassificationBatch(images, labels, labels.flip(0), torch.tensor(0.7), torch.tensor(0.3))
    first, second = student(images)
    terms = supervised_terms((first, second), batch, 0.1, teacher)
    target = 0.7 * F.one_hot(labels, 10) + 0.3 * F.one_hot(labels.flip(0), 10)
    target = 0.9 * target + 0.01
    own = -(target * first.log_softmax(1)).sum(1).mean()
    config = teacher_net.pretrained_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        decided = teacher_net.eval()(((images * 0.5 + 0.5) - mean) / std).argmax(1)
    torch.testing.assert_close(terms[0], 0.7 * own)
    torch.testing.assert_close(terms[1], 0.3 * F.cross_entropy(second, decided))
    assert not any(p.requires_grad for p in teacher.parameters())

    with pytest.raises(VitfocusError, match="The teacher resnet10t has no weights"):
        train(tiny("teacher=resnet10t", "epochs=1"), tmp_path / "none")
    recipe = tiny(
        "spec=deit_tiny_distilled_patch16_224", "teacher=resnet10t", "kind=soft", "temperature=3.0", "epochs=1",
        f"distill.weights={tmp_path / 'teacher.safetensors'}",
    )  # fmt: skip
    train(recipe, tmp_path / "soft")
    assert all(
        row["distill"] > 0 and math.isclose(row["loss"], row["ce"] + row["distill"]) for row in rows(tmp_path / "soft")
    )


def test_the_diversification_loss_warms_up(tmp_path: Path) -> None:
    common = ["spec=vit_tiny_patch16_224+adl(threshold=0.5)", *PLAIN, "lr=0", "warmup_lr=0", "min_lr=0"]
    for name, more in (("at_once", []), ("rising", ["adl_warmup_epochs=1"])):
        train(tiny(*common, *more), tmp_path / name)
    at_once, rising = rows(tmp_path / "at_once"), rows(tmp_path / "rising")
    for step, (one, other) in enumerate(zip(at_once, rising, strict=True)):
        assert one["ce"] == other["ce"] and one["adl"] > 0
        assert other["adl"] == pytest.approx(one["adl"] * min(1.0, step * 16 / 88), rel=1e-5)


def test_the_schedule_is_timms() -> None:
    plan = TrainingSchedule.of(tiny("epochs=10", "warmup_epochs=2", "lr=0.01", "min_lr=1e-4", "warmup_lr=1e-5"), 160)
    optimiser = torch.optim.SGD([torch.zeros(1)], 0.01)
    schedule = CosineLRScheduler(
        optimiser, 80, lr_min=1e-4, warmup_t=20, warmup_lr_init=1e-5, warmup_prefix=True, t_in_epochs=False
    )
    for step in range(100):
        schedule.step_update(step)
        assert plan.learning_rate(step) == pytest.approx(optimiser.param_groups[0]["lr"], rel=1e-9)
    assert [step for step in range(100) if plan.ends_epoch(step)] == list(range(9, 100, 10))
    with pytest.raises(VitfocusError, match="accumulate=3"):
        train(tiny("accumulate=3"))


def test_mixed_labels_need_no_dense_target() -> None:
    logits, labels = torch.randn(8, 5), torch.randint(5, (8,))
    others = labels.roll(1)
    dense = 0.25 * F.one_hot(labels, 5) + 0.75 * F.one_hot(others, 5)
    expected = F.cross_entropy(logits, dense, label_smoothing=0.2)
    torch.testing.assert_close(
        cross_entropy(logits, ClassificationBatch(logits, labels, others, torch.tensor(0.25), torch.tensor(0.75)), 0.2),
        expected,
    )


def test_tensorboard_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(VitfocusError, match=r"vitfocus\[track\]"):
        train(tiny("tensorboard=true"), tmp_path)


def test_bf16_trains_on_the_cpu(tmp_path: Path) -> None:
    results = train(tiny("precision=bf16", "epochs=1"), tmp_path)
    assert results["precision"] == "bf16" and all(value.dtype == torch.float32 for value in weights(tmp_path).values())


def test_a_caller_may_hold_a_run_back(tmp_path: Path) -> None:
    seen = list[int]()

    def hold(step: int) -> None:
        seen.append(step)
        time.sleep(1.0 if step == 3 else 0.0)

    began = time.perf_counter()
    results = train(tiny("evaluate_every=0"), tmp_path, before_step=hold)
    assert seen == list(range(11)) and results["finished"]
    assert results["seconds"] < time.perf_counter() - began - 0.95


def test_images_that_the_model_does_not_take_are_said_before_they_are_read(tmp_path: Path) -> None:
    for argument, said in (
        ("img_size=64", r"\(3, 16, 16\): Input height \(16\)"),
        ("in_chans=1", "to have 1 channels"),
    ):
        with pytest.raises(VitfocusError, match=f"does not accept this recipe's images, .*{said}.*; change data.size"):
            train(tiny(f"model.arguments.{argument}"), tmp_path / argument)


def test_a_network_without_attention_trains_too(tmp_path: Path) -> None:
    recipe = tiny("spec=test_efficientnet", "model.arguments={}", "epochs=1", "head_lr=0.01", "size=32")
    assert train(recipe, tmp_path)["finished"]
    assert vf.load(tmp_path / "model")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [("shapes_segment", "in_chans=1"), ("shapes_detect", "in_chans=1"), ("shapes_answer", "num_channels=1")],
)
def test_every_task_says_what_its_model_does_not_take(recipe: str, argument: str, tmp_path: Path) -> None:
    chosen = load_recipe(recipe, [f"model.arguments.{argument}", "train_length=4", "val_length=2"])
    with pytest.raises(VitfocusError, match=r"does not accept this recipe's images, \(3, .*channel"):
        train(chosen, tmp_path)


def test_a_teacher_answers_about_the_same_classes_whatever_its_library(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.ViTConfig(**small, intermediate_size=32, num_labels=4)
    net = transformers.ViTForImageClassification(config).eval()
    vf.save(net, tmp_path / "net")
    seen = vf.anatomy(net)
    mean, std = (torch.tensor(values)[:, None, None] for values in (seen.mean, seen.std))
    teacher = Teacher(Distill(teacher=str(tmp_path / "net")), 4, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    pixels = torch.rand(2, 3, 16, 16)
    shown = (pixels - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[:, None, None]
    with torch.no_grad():
        torch.testing.assert_close(teacher(shown), net((pixels - mean) / std).logits)
    for kind in ("hard", "soft"):
        with pytest.raises(VitfocusError, match="returns 4 classes, but the student has 10"):
            train(tiny(f"teacher={tmp_path / 'net'}", f"kind={kind}"), tmp_path / kind)


def test_parts_that_would_tear_mixed_pairs_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VitfocusError, match="batch=6 is divided into parts of 3 images"):
        train(tiny("batch=6", "accumulate=2", "mixup=0.8"), tmp_path)
    assert train(tiny("batch=6", "accumulate=2", "epochs=1"), tmp_path / "plain")["finished"]


@pytest.mark.parametrize("name", ["lamb", "adan", "lion"])
def test_a_checkpoint_holds_all_that_an_optimiser_remembers(name: str, tmp_path: Path) -> None:
    """Lamb keeps its count of steps in the group, as a tensor; Adan has three betas of its own."""
    recipe = tiny(f"optimiser.name={name}")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoints" / "00000009"))
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", ["adahessian", "adafactorbv"])
def test_unusable_optimisers_are_refused_before_training(name: str, tmp_path: Path) -> None:
    with pytest.raises(VitfocusError, match=f"The optimiser {name} cannot train here"):
        train(tiny(f"optimiser.name={name}"), tmp_path)
    with pytest.raises(VitfocusError, match=r"optimiser\.betas is not an argument of this optimiser"):
        tiny("optimiser.name=adan", "betas=[0.9,0.99]")


@pytest.mark.parametrize(
    ("spec", "arguments", "head"),
    [
        ("torchvision:vit_b_16", "{image_size=16,dropout=0.0}", "heads.head."),
        (
            "transformers:ViTForImageClassification",
            "{image_size=16,patch_size=8,num_hidden_layers=1,num_attention_heads=2,hidden_size=16,intermediate_size=32}",
            "classifier.",
        ),
    ],
)
def test_the_head_of_any_library_is_found(
    spec: str, arguments: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(patch_size: int, image_size: int, dropout: float, num_classes: int, **sizes: Any) -> nn.Module:
        return torchvision.models.VisionTransformer(image_size, patch_size, 1, 2, 16, 32, num_classes=num_classes)

    monkeypatch.setattr(torchvision.models.vision_transformer, "_vision_transformer", small)
    if spec.startswith("transformers"):
        pytest.importorskip("transformers")
    recipe = tiny(f"spec={spec}", f"model.arguments={arguments}", "optimiser.train=head", "train_length=16", "epochs=1")
    before = build_model(recipe, model_arguments(recipe, 10)).state_dict()
    train(recipe, tmp_path)
    after = vf.load(tmp_path / "model").state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {f"{head}weight", f"{head}bias"}


def test_models_that_are_not_classifiers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = "{image_size=16,patch_size=8,num_hidden_layers=1,num_attention_heads=2,hidden_size=16}"
    with pytest.raises(VitfocusError, match="a classifier is expected"):
        train(tiny("spec=transformers:ViTModel", f"model.arguments={arguments}"), tmp_path)


def test_layer_decay_knows_the_layers_of_other_libraries() -> None:
    """And of a model that stands on a vision transformer: what comes after the blocks has the whole rate."""
    backbone = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
    vit = torchvision.models.VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    segmenter = vf.create_model(f"upernet:{SPEC}+cbs", num_classes=3, channels=8, **backbone)
    for model, first, last in ((vit, "conv_proj", "heads."), (segmenter, "patch_embed", "decoder.")):
        optimiser = create_optimiser(model, Optimiser(layer_decay=0.5, lr=1.0), torch.device("cpu"))
        scale = {id(p): group["lr_scale"] for group in optimiser.param_groups for p in group["params"]}
        assert len(scale) == len(list(model.parameters()))
        for number, block in enumerate(vf.anatomy(model)):
            assert {scale[id(p)] for p in block.host.parameters()} == {(0.25, 0.5)[number]}
        named = list(model.named_parameters())
        assert {scale[id(p)] for name, p in named if first in name} == {0.125}
        assert {scale[id(p)] for name, p in named if name.startswith(last)} == {1.0}
