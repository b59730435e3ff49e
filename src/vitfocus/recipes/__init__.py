"""The sections of a recipe as typed records: the meaning, type and bounds of every key.

A key that has an effect only together with another setting declares that in its annotation (`only_with`). Which keys of
the shared sections a task reads is in its `reads`. This module does not postpone the evaluation of annotations, because
the conditions in them refer to its functions.
"""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from msgspec import Meta, Struct, structs, to_builtins

from vitfocus.core.arguments import OnlyWith, conditions, only_with
from vitfocus.core.records import FINITE, Count

Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0, le=FINITE)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
#: Marks a key that may change when a run is resumed: it has no influence on what was done before.
CHANGEABLE = "may change when a run is resumed"

# Conditions that several keys share, or that depend on more than one other key.


def _library(recipe: "Recipe") -> str:
    """The prefix of the model's name, such as "torchvision" or "upernet"; empty for timm's models."""
    return recipe.model.spec.partition("+")[0].rpartition(":")[0].partition(":")[0].strip()


def _kept_on_device(recipe: "Recipe") -> bool:
    """Whether images are certainly kept on the device; for some sources it depends on the content of the folder."""
    data = recipe.data
    return data.resident == "yes" or (data.resident == "auto" and data.source in ("shapes", "arrays"))


def _reads_files(recipe: "Recipe") -> bool:
    return recipe.data.source != "shapes"


def _mixes(recipe: "Recipe", share: float, other: float) -> bool:
    """Whether one of mixup and cutmix is ever chosen, given its share of the steps and the strength of the other."""
    return bool(recipe.augment.mix_probability and (share or not other))


def _optimiser_takes(recipe: "Recipe", what: str) -> bool:
    from timm.optim import get_optimizer_info, list_optimizers

    name = recipe.optimiser.name
    if name not in list_optimizers():  # refused elsewhere, with the nearest name
        return True
    info = get_optimizer_info(name)
    return bool(getattr(info, f"has_{what}")) and (what != "betas" or info.num_betas == 2)


def _warms_up(recipe: "Recipe") -> bool:
    schedule = recipe.schedule
    return bool(schedule.warmup_steps or (schedule.warmup_epochs and not schedule.steps))


_FROM_FILES = OnlyWith(_reads_files, "is for data sets on disk, and Shapes are drawn: set another data.source")
_WITH_TEACHER = OnlyWith(lambda recipe: bool(recipe.distill.teacher), "needs a teacher: set distill.teacher")
_OTHER_OPTIMISER = "is not an argument of this optimiser: set optimiser.name=adamw"


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of a recipe."""

    #: Pairs whose second number must be no less than the first.
    rising: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.rising:
            low, high = getattr(self, name)
            if low > high:
                section = type(self).__name__.lower()
                raise ValueError(f"{section}.{name} is {low:g}, {high:g}; expected the smaller number first.")


class Model(Section, frozen=True):
    """What is trained: a spec such as "deit_small_patch16_224+cb(layers=upper)+adl"."""

    spec: str = "deit_tiny_patch16_224"
    pretrained: bool = False  # start from the library's weights, which it may download
    weights: str = ""  # start from this file, or from a folder that vitfocus.save wrote
    drop_path: Annotated[
        Fraction,
        OnlyWith(
            lambda recipe: (
                _library(recipe) not in ("torchvision", "transformers")
                and "drop_path_rate" not in recipe.model.arguments
            ),
            "is not passed to this model's constructor: set it in model.arguments",
        ),
    ] = 0.0
    arguments: dict[str, Any] = {}  # further arguments of the model's constructor


class Data(Section, frozen=True):
    """Which images, how many at a time, and where they are kept."""

    source: str = "folder"  # shapes, cifar10, cifar100, fashion-mnist, arrays, folder, shards, or timm:NAME
    root: Annotated[str, _FROM_FILES] = ""
    train_split: Annotated[str, _FROM_FILES] = ""  # name of a folder or of shards; empty: the usual names
    val_split: Annotated[
        str,
        OnlyWith(
            lambda recipe: _reads_files(recipe) and not recipe.data.holdout,
            "names a validation split on disk: set another data.source, without data.holdout",
        ),
    ] = ""
    train_length: Count = 0  # only the first N images; 0: all (Shapes: 20,000 and 2,000)
    val_length: Count = 0
    holdout: Annotated[
        Count,
        OnlyWith(
            lambda recipe: recipe.task != "answer" or _reads_files(recipe),
            "holds out images of files: set data.source=vqav2",
        ),
    ] = 0  # N training images, drawn once, are the validation set; 0: the data set's own
    size: Annotated[int, Meta(ge=8)] = 224
    batch: Annotated[int, Meta(ge=1, le=10**6)] = 1024  # over all processes and all accumulated parts
    repeats: Positive = 1  # repeated augmentation: each chosen image N times, usually in one batch
    resident: Literal["auto", "yes", "no"] = "auto"  # keep the whole set as one tensor on the device
    enlarge: Count = 0  # enlarge resident images from size to N pixels after augmentation; 0: do not
    workers: Annotated[Count, CHANGEABLE] = 4
    download: Annotated[
        bool,
        OnlyWith(
            lambda recipe: (
                recipe.data.source.startswith("timm:") or recipe.data.source in ("cifar10", "cifar100", "fashion-mnist")
            ),
            "is for torchvision's and timm's data sets: set one of them as data.source",
        ),
    ] = False
    # Whether an unreadable image ends the run; skipped ones are counted.
    broken: Annotated[Literal["fatal", "skip"], CHANGEABLE] = "fatal"
    crop: Annotated[
        float,
        Meta(ge=0.05, le=1),
        OnlyWith(
            lambda recipe: not _kept_on_device(recipe),
            "is for images that are read one by one, but these are kept on the device: set data.resident=no",
        ),
    ] = 0.875  # evaluation: the centre's share of the resized image
    interpolation: Annotated[
        Literal["bicubic", "bilinear"],
        OnlyWith(
            lambda recipe: recipe.data.source != "shapes" or not _kept_on_device(recipe),
            "is for images that are resized, and Shapes are drawn at data.size: set another data.source",
        ),
    ] = "bicubic"


class Augment(Section, frozen=True):
    """What happens to training images."""

    rising: ClassVar[tuple[str, ...]] = ("scale",)

    crop: Literal["resized", "pad", "none"] = "resized"
    scale: Annotated[
        tuple[Annotated[float, Meta(ge=1e-6, le=1)], Annotated[float, Meta(ge=1e-6, le=1)]],
        only_with("augment.crop", "resized"),
    ] = (0.08, 1.0)  # share of the area
    padding: Annotated[Count, only_with("augment.crop", "pad")] = 4  # zeros around the image before it is cropped
    flip: Fraction = 0.5
    randaugment: str = "rand-m9-mstd0.5-inc1"  # in timm's notation; empty: none
    colour_jitter: Annotated[
        Amount,
        OnlyWith(
            lambda recipe: not recipe.augment.randaugment or "3a" in recipe.augment.randaugment,
            "is left out beside RandAugment, as in timm: set augment.randaugment=",
        ),
    ] = 0.0
    erase: Fraction = 0.25
    patchwise: Count = 0  # an additional pass over images whose patches of N pixels are augmented, as for RVT; 0: none
    mixup: Annotated[
        Amount,
        OnlyWith(
            lambda recipe: _mixes(recipe, 1 - recipe.augment.cutmix_share, recipe.augment.cutmix),
            "is never chosen here: set augment.mix_probability above 0 and augment.cutmix_share below 1",
        ),
    ] = 0.8
    cutmix: Annotated[
        Amount,
        OnlyWith(
            lambda recipe: _mixes(recipe, recipe.augment.cutmix_share, recipe.augment.mixup),
            "is never chosen here: set augment.mix_probability and augment.cutmix_share above 0",
        ),
    ] = 1.0
    mix_probability: Annotated[
        Fraction,
        OnlyWith(
            lambda recipe: bool(recipe.augment.mixup or recipe.augment.cutmix),
            "is for mixup and cutmix, and both are off: set augment.mixup or augment.cutmix",
        ),
    ] = 1.0
    cutmix_share: Annotated[
        Fraction,
        OnlyWith(
            lambda recipe: bool(recipe.augment.mixup and recipe.augment.cutmix and recipe.augment.mix_probability),
            "chooses between mixup and cutmix, and not both are on: set augment.mixup and augment.cutmix",
            zero_counts=True,
        ),
    ] = 0.5  # how often cutmix rather than mixup


class Loss(Section, frozen=True):
    """Cross-entropy and additional terms. The weight of the diversification loss is in the spec: adl(weight=1)."""

    smoothing: Fraction = 0.1
    adl_warmup_epochs: Annotated[
        Amount,
        OnlyWith(
            lambda recipe: re.search(r"\+\s*adl\b", recipe.model.spec) is not None,
            "is for adl, which is not in model.spec: add +adl to it",
        ),
    ] = 0.0  # the weight of ADL rises from 0 over this many epochs


class Optimiser(Section, frozen=True):
    """timm's optimiser by name, and its parameter groups."""

    name: str = "adamw"
    lr: Amount = 1e-3
    lr_batch: Count = 0  # the batch size that lr is for, from which it is scaled linearly; 0: lr is not scaled
    weight_decay: Amount = 0.05
    betas: Annotated[
        tuple[Fraction, Fraction], OnlyWith(lambda recipe: _optimiser_takes(recipe, "betas"), _OTHER_OPTIMISER)
    ] = (0.9, 0.999)
    eps: Annotated[Amount, OnlyWith(lambda recipe: _optimiser_takes(recipe, "eps"), _OTHER_OPTIMISER)] = 1e-8
    layer_decay: Fraction = 0.0  # each layer's learning rate as a multiple of the next one's; 0: off
    head_lr: Annotated[Amount, only_with("optimiser.train", "head", "all")] = 1.0  # the head's rate over the trunk's
    clip: Amount = 0.0  # largest gradient norm; 0: off
    train: Literal["all", "added", "head"] = "all"  # added: only what treatments added; head: the classifier as well


class Schedule(Section, frozen=True):
    """Linear warm-up, then a decay, counted in steps."""

    epochs: Annotated[float, Meta(ge=1e-9, le=FINITE)] = 300.0
    steps: Count = 0  # the run's length in steps, in place of epochs; 0: by epochs
    warmup_epochs: Amount = 5.0
    warmup_steps: Count = 0  # in place of warmup_epochs; 0: by epochs, and none where the run counts steps
    warmup_lr: Annotated[Amount, OnlyWith(_warms_up, "needs a warm-up: set its length")] = 1e-6
    decay: Literal["cosine", "linear", "polynomial", "drops"] = "cosine"
    power: Annotated[Amount, only_with("schedule.decay", "polynomial", zero_counts=True)] = 1.0
    # shares of the run after which the rate is divided by ten
    drops: Annotated[tuple[Fraction, Fraction], only_with("schedule.decay", "drops")] = (2 / 3, 11 / 12)
    min_lr: Amount = 1e-5


class Distill(Section, frozen=True):
    """A teacher, any timm model. Hard: its prediction is a second label, as in DeiT; soft: its whole output."""

    teacher: str = ""
    kind: Annotated[Literal["hard", "soft"], _WITH_TEACHER] = "hard"
    weight: Annotated[Fraction, _WITH_TEACHER] = 0.5
    temperature: Annotated[
        float,
        Meta(ge=1e-6, le=FINITE),
        OnlyWith(
            lambda recipe: bool(recipe.distill.teacher) and recipe.distill.kind == "soft",
            "is for soft distillation: set distill.teacher and distill.kind=soft",
        ),
    ] = 1.0
    pretrained: Annotated[
        bool,
        OnlyWith(
            lambda recipe: bool(recipe.distill.teacher) and not Path(recipe.distill.teacher).is_dir(),
            "needs a teacher that is named as in its library: set distill.teacher",
        ),
    ] = False  # take the teacher's weights from its library, which may download them
    weights: Annotated[str, _WITH_TEACHER] = ""


class Engine(Section, frozen=True):
    """How the run is executed and what it writes."""

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 on CUDA, fp32 elsewhere
    compile: Literal["auto", "yes", "no", "blocks"] = "auto"  # auto: on CUDA; blocks: compiles faster, fuses less
    record: Literal["auto", "no"] = "auto"  # auto: a step on one CUDA device is captured as a CUDA graph and replayed
    accumulate: Positive = 1  # parts in which one process takes its share of a batch
    ema: Fraction = 0.0  # decay of the moving average of the weights; 0: none
    evaluate_every: Annotated[Count, CHANGEABLE] = 1  # epochs; the last is always evaluated
    evaluate_steps: Annotated[Count, CHANGEABLE] = 0  # steps, in place of epochs; 0: by epochs
    log_every: Annotated[Positive, CHANGEABLE] = 20  # steps
    checkpoint_steps: Annotated[Count, CHANGEABLE] = 0  # write a checkpoint every N steps; 0: by time alone
    checkpoint_minutes: Annotated[Amount, CHANGEABLE] = 5.0  # and when the last one is this old; 0: not by time
    keep: Annotated[Positive, CHANGEABLE] = 2  # newest checkpoints kept
    tensorboard: Annotated[bool, CHANGEABLE] = False
    track: Annotated[Literal["no", "wandb", "mlflow"], CHANGEABLE] = "no"  # log to W&B or MLflow as well


class Segment(Section, frozen=True):
    """Training images and the test protocol of semantic segmentation; `data.size` is the training crop."""

    rising: ClassVar[tuple[str, ...]] = ("scale",)

    scale: tuple[Annotated[float, Meta(ge=1e-3, le=FINITE)], Annotated[float, Meta(ge=1e-3, le=FINITE)]] = (0.5, 2.0)
    short_side: Count = 0  # images are first resized so that this is their short side; 0: as they are
    photometric: bool = True  # training: random brightness, contrast, saturation and hue
    most_of_one: Fraction = 0.75  # training: no crop shows more than this share of one class, where avoidable
    auxiliary: Annotated[
        Amount,
        OnlyWith(
            lambda recipe: (
                _library(recipe) == "upernet" and bool(recipe.model.arguments.get("auxiliary_channels", True))
            ),
            "needs an auxiliary head: use upernet with auxiliary_channels above 0",
        ),
    ] = 0.4  # weight of the auxiliary head's loss
    window: Count = 0  # test: side of the sliding window; 0: the whole image at once
    stride: Count = 0  # test: from one window to the next; 0: two thirds of the window
    test_flip: bool = False  # test: average with the mirrored image's prediction


class Detect(Section, frozen=True):
    """Images of detection and instance segmentation; `data.size` is the shortest side, at test time too."""

    rising: ClassVar[tuple[str, ...]] = ("sides", "jitter")

    longest: Annotated[int, Meta(ge=8)] = 1333  # the longest side is at most this, at the cost of the shortest
    sides: tuple[Amount, Amount] = (0.0, 0.0)  # training: shortest sides between these, in steps of 32; 0: data.size
    # training: large-scale jitter of a square; 1, 1: off
    jitter: tuple[Annotated[float, Meta(ge=1e-3, le=FINITE)], Annotated[float, Meta(ge=1e-3, le=FINITE)]] = (1.0, 1.0)
    keep_empty: Annotated[
        bool,
        OnlyWith(_reads_files, "is for data sets on disk, and Shapes always show an object: set another data.source"),
    ] = False  # training: images without an object too


class Answer(Section, frozen=True):
    """Visual question answering; `data.size` is the shorter side of an image.

    A model that starts from a checkpoint keeps the checkpoint's answers and word pieces if it has any.
    """

    answers: Positive = 3129  # at most this many of the most frequent answers of the training questions
    least: Positive = 1  # answers must be agreed on at least this many times
    words: Annotated[int, Meta(ge=16)] = 30522  # largest size of the vocabulary of word pieces
    longest: Annotated[int, Meta(ge=3)] = 40  # word pieces after which a question is cut off, including start and end


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run, resolved. `to_toml` writes it so that `load_recipe` reads the same record again.

    Change one with `msgspec.structs.replace`.
    """

    name: str = "recipe"
    about: str = ""
    task: str = "classify"
    model: Model = Model()
    data: Data = Data()
    augment: Augment = Augment()
    loss: Loss = Loss()
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    distill: Distill = Distill()
    engine: Engine = Engine()
    segment: Segment = Segment()
    detect: Detect = Detect()
    answer: Answer = Answer()

    def to_toml(self) -> str:
        """The recipe as TOML, every key spelled out; of the tasks' sections, this task's alone."""
        import tomli_w

        others = {"segment", "detect", "answer"} - {self.task}
        return tomli_w.dumps({key: value for key, value in to_builtins(self).items() if key not in others})


SECTIONS: dict[str, type[Section]] = {
    name: kind for name, kind in get_type_hints(Recipe).items() if issubclass(kind, Section)
}
#: Every key by its full name ("data.batch"), with the annotated type.
KEYS: dict[str, Any] = {
    f"{section}.{name}": get_type_hints(kind, include_extras=True)[name]
    for section, kind in SECTIONS.items()
    for name in kind.__struct_fields__
}
CONDITIONS: dict[str, OnlyWith] = {
    f"{section}.{name}": condition for section, kind in SECTIONS.items() for name, condition in conditions(kind).items()
}


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of a key by its full name.

    >>> value_of(Recipe(), "data.batch")
    1024
    """
    section, name = key.split(".")[:2]
    return getattr(getattr(recipe, section), name)


def is_changeable(key: str) -> bool:
    """Whether a key, by its full name, may change when a run is resumed."""
    return CHANGEABLE in getattr(KEYS[key], "__metadata__", ())


def changed(section: Section) -> dict[str, Any]:
    """The keys of a section that differ from their defaults.

    >>> changed(Data(batch=8))
    {'batch': 8}
    """
    default = structs.asdict(type(section)())
    return {name: value for name, value in structs.asdict(section).items() if value != default[name]}
