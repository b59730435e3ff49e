"""The sections of a recipe: plain records that say what each key means, its type and what it may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitfocus.data.settings import Augment, Data, bounded, choice, harmless, pair
from vitfocus.tasks.settings import Answer, Detect, Segment

__all__ = [
    "Answer",
    "Augment",
    "Data",
    "Detect",
    "Distill",
    "Engine",
    "Loss",
    "Model",
    "Optimiser",
    "Schedule",
    "Segment",
]


@dataclass(frozen=True)
class Model:
    """What is trained: a spec such as "deit_small_patch16_224+cb(layers=upper)+adl"."""

    spec: str = "deit_tiny_patch16_224"
    pretrained: bool = False  # start from the library's weights, which it may download
    weights: str = ""  # start from this file, or from a folder that vitfocus.save wrote
    drop_path: float = bounded(0.0, 0, 1)
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's constructor


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, and what is added to it. The diversification loss has its weight in the spec: adl(weight=1)."""

    smoothing: float = bounded(0.1, 0, 1)
    adl_warmup_epochs: float = bounded(0.0)  # ADL's weight rises from 0 over so many epochs


@dataclass(frozen=True)
class Optimiser:
    """timm's optimiser by name, and its groups."""

    name: str = "adamw"
    lr: float = bounded(1e-3)
    lr_batch: int = bounded(0)  # the batch that lr is meant for, scaled linearly to the real one; 0: lr as it is
    weight_decay: float = bounded(0.05)
    betas: tuple[float, float] = pair((0.9, 0.999), 0, 1, rising=False)
    eps: float = bounded(1e-8)
    layer_decay: float = bounded(0.0, 0, 1)  # each layer's rate as a multiple of the next one's; 0: off
    head_lr: float = bounded(1.0)  # the rate of what stands on the trunk, as a multiple of the trunk's
    clip: float = bounded(0.0)  # largest gradient norm; 0: off
    train: str = choice("all", "added", "head")  # added: what treatments added, nothing else; head: the classifier too


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a decay, counted in steps."""

    epochs: float = bounded(300.0, 1e-9)
    steps: int = bounded(0)  # the run's length in steps, in place of epochs; 0: by epochs
    warmup_epochs: float = bounded(5.0)
    warmup_steps: int = bounded(0)  # in place of warmup_epochs; 0: by epochs, and none where the run counts steps
    warmup_lr: float = bounded(1e-6)
    decay: str = choice("cosine", "linear", "polynomial", "drops")
    power: float = bounded(1.0)  # decay=polynomial
    # decay=drops: shares of the run after which the rate is a tenth
    drops: tuple[float, float] = pair((2 / 3, 11 / 12), 0, 1, rising=False)
    min_lr: float = bounded(1e-5)


@dataclass(frozen=True)
class Distill:
    """A teacher, any timm model. Hard: its decision is a second label, as in DeiT; soft: its whole output."""

    teacher: str = ""
    kind: str = choice("hard", "soft")
    weight: float = bounded(0.5, 0, 1)
    temperature: float = bounded(1.0, 1e-6)
    pretrained: bool = False  # take the teacher's weights from its library, which may download them
    weights: str = ""


@dataclass(frozen=True)
class Engine:
    """How the run is carried out and what it leaves behind."""

    seed: int = bounded(0, -(2**63), 2**63 - 1)
    device: str = choice("auto", "cpu", "cuda")
    precision: str = choice("auto", "fp32", "bf16", "fp16")  # auto: bf16 on CUDA, fp32 elsewhere
    compile: str = choice("auto", "yes", "no", "blocks")  # auto: on CUDA; blocks: quicker to compile, less is fused
    record: str = choice("auto", "no")  # auto: a step on one CUDA device is recorded once and replayed
    accumulate: int = bounded(1, 1)  # parts that one process takes its share of a batch in
    ema: float = bounded(0.0, 0, 1)  # decay of the moving average of the weights; 0: none
    evaluate_every: int = harmless(1)  # epochs; the last is always evaluated
    evaluate_steps: int = harmless(0)  # steps, in place of epochs; 0: by epochs
    log_every: int = harmless(20, 1)  # steps
    checkpoint_steps: int = harmless(0)  # a checkpoint every so many steps; 0: by time alone
    checkpoint_minutes: float = harmless(5.0)  # and whenever the last one is so old; 0: not by time
    keep: int = harmless(2, 1)  # newest checkpoints kept
    tensorboard: bool = field(default=False, metadata={"harmless": True})
