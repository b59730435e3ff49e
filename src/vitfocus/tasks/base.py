"""The interface between the training engine and a task, and how the model of a recipe is built.

The engine calls `open_data`, `build_model` and `start`, and then `iterate`, `terms` and `evaluate` at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vitfocus.anatomy import anatomy, input_spec
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.files import is_folder
from vitfocus.core.modules import eval_mode, inserted, unnest_checkpoint
from vitfocus.data.image_files import Normalise
from vitfocus.data.loader import BatchPartition, BatchReader, SampleBatches, SampleOrder
from vitfocus.treatments import AttentionDiversification, auxiliary_loss
from vitfocus.treatments.builder import split_library
from vitfocus.treatments.safe_arguments import file_arguments
from vitfocus.treatments.save_load import create_model, load
from vitfocus.treatments.spec import is_record, recorded_treatments, split_spec
from vitfocus.treatments.surgery import applied
from vitfocus.treatments.weights import load_weights, read_weights

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.data.classification.batches import ResidentBatches
    from vitfocus.recipes import Recipe


@dataclass(frozen=True)
class RunContext:
    """Where a run takes place: its device, this process's rows of a batch, and whether the model is compiled.

    `until_stopped` yields the batches of an evaluation, and raises an error if the run was asked to stop.
    """

    device: torch.device
    partition: BatchPartition
    compiled: bool = False
    say: Callable[[str], None] = print
    until_stopped: Callable[[Iterable[Any]], Iterator[Any]] = iter


#: The keys of [data] that every task reads.
DATA_KEYS = frozenset(
    {"source", "root", "train_split", "val_split", "train_length", "val_length", "size", "batch", "workers", "broken"}
)


#: Keys of the shared sections that segmentation and detection read.
DENSE_TASK_KEYS: Mapping[str, frozenset[str]] = {
    "augment": frozenset({"flip"}),
    "loss": frozenset({"adl_warmup_epochs"}),
    "distill": frozenset(),
    "data": DATA_KEYS | {"repeats"},
}


class Task(ABC):
    """One task of one recipe. `open_data` must set `train`, `val` and `classes`, `start` the `names` and `batches`."""

    name: ClassVar[str]
    items: ClassVar[str] = "images"  # what is counted in messages: the samples of a batch
    best: ClassVar[str]  # the score by which the best model is chosen; higher is better
    #: Keys of a recipe's shared sections that this task reads; sections that are missing here are read completely.
    reads: ClassVar[Mapping[str, frozenset[str]]] = {}
    compiles: ClassVar[bool] = True  # whether engine.compile=auto compiles the model on a GPU

    train: Any  # the data sets
    val: Any
    batches: Any

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.classes: list[str] = []
        self.train_images = self.val_images = 0
        self.names: list[str] = []  # of the loss terms, in the order of `terms`
        self.readers = {
            split: BatchReader(recipe.data.workers, skip=recipe.data.broken == "skip") for split in ("train", "val")
        }

    @abstractmethod
    def open_data(self) -> None:
        """Open the training and validation data and set `classes`; an error says what is missing."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, initialised from the recipe's seed, and from `model.weights` if given."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor in `model.spec`, from which a saved model is built again."""

    def start(self, model: nn.Module, context: RunContext) -> None:
        """Prepare batches, losses and evaluation data; `model` is on the device and not wrapped."""
        self.model, self.context = model, context
        self.train_images, self.val_images = len(self.train), len(self.val)
        seen = input_spec(model)
        self.normalise = Normalise(seen.mean, seen.std, context.device)
        self.diversifies = any(isinstance(one, AttentionDiversification) for one in applied(model))
        for reader in self.readers.values():
            reader.device, reader.say = context.device, context.say

    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """This process's parts of the steps from start to stop; each depends on (seed, step) only."""
        return self.batches.iterate(start, stop)

    def sample_batches(
        self, samples: Dataset[Any], collate: Callable[[list[Any]], Any], finish: Callable[[Any, int, Tensor], Any]
    ) -> SampleBatches:
        """Training batches of samples that are read one by one; the arguments are those of `SampleBatches`."""
        data = self.recipe.data
        groups = getattr(self.train, "groups", ())
        order = SampleOrder(len(self.train), data.batch, self.recipe.engine.seed, data.repeats, groups)
        return SampleBatches(samples, order, self.context.partition, collate, finish, self.readers["train"])

    def validation_batches(
        self, samples: Dataset[Any], keys: Iterable[Any], collate: Callable[[list[Any]], Any] = list
    ) -> Iterator[tuple[list[Any], Any]]:
        """The keys and the batch of the readable samples for each list of keys, until the run is asked to stop."""
        with closing(self.readers["val"].batches(samples, keys, collate)) as loaded:
            for readable, batch in self.context.until_stopped(loaded):
                if batch is not None:
                    yield readable, batch

    def capturable_batches(self) -> ResidentBatches | None:
        """The batches, if a whole step can be captured in a CUDA graph."""
        return None

    def diversity_terms(self, epoch: float) -> list[Tensor]:
        """The Attention Diversification Loss of the last forward pass, with its warm-up; empty if it is not applied."""
        if not self.diversifies:
            return []
        warmup = self.recipe.loss.adl_warmup_epochs
        return [auxiliary_loss(self.model) * (min(1.0, epoch / warmup) if warmup else 1.0)]

    @abstractmethod
    def terms(self, model: nn.Module, batch: Any, epoch: float) -> list[Tensor]:
        """Run the (wrapped) model on one part; the loss terms in the order of `names`; their sum is the loss."""

    def first_pass(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The loss of an additional pass, run backward before `terms`; if there is one, it is the last of `names`."""
        return None

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Scores on the validation data over all processes, accuracies in [0, 1]; every process returns the same.

        The model's mode is restored. Batches go through `validation_batches` or `RunContext.until_stopped`.
        """

    @abstractmethod
    def headline(self, scores: Mapping[str, float]) -> str:
        """The scores as one readable line."""

    def sample_images(self, count: int) -> Any:
        """At most `count` validation images as `vitfocus.diagnose` takes them; None if the task has none."""
        return None

    @torch.no_grad()
    def dry_run(self, model: nn.Module, size: int, call: Callable[[Tensor], Any]) -> None:
        """Run the model on one black image of the recipe's size, so that a mismatch is an error before training.

        `call` runs it on a (1, 3, size, size) tensor, in eval mode.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            return
        try:
            with eval_mode(model), torch.random.fork_rng(devices=[]):
                call(torch.zeros(1, 3, size, size))
        except VitfocusError:
            raise
        except Exception as error:  # libraries raise many types for unexpected images
            raise VitfocusError(
                f"{self.recipe.model.spec} does not accept this recipe's images, (3, {size}, {size}): {reason(error)}; "
                "change data.size or model.arguments."
            ) from None

    def digests(self) -> dict[str, str]:
        """A SHA-256 of each split of the data."""
        return {"train": self.train.digest(), "val": self.val.digest()}

    def card(self) -> dict[str, Any]:
        """What a saved model records about its task, for JSON; `treatments.save_load.task_of` reads it.

        The training run calls it after `build_model`.
        """
        return {"task": self.name, "classes": list(self.classes)}

    def facts(self) -> dict[str, Any]:
        """More entries of results.json."""
        return {}

    def head_names(self, model: nn.Module) -> set[str]:
        """Parameters with the learning rate `optimiser.head_lr`: by default all outside the vision transformer."""
        try:
            inside: nn.Module = anatomy(model).root
        except VitfocusError:  # the backbone is not a transformer
            inside = next((module for module in model.modules() if getattr(module, "pretrained_cfg", None)), model)
        inner = {id(parameter) for parameter in inside.parameters()}
        return {name for name, parameter in model.named_parameters() if id(parameter) not in inner}

    @classmethod
    def uses(cls, section: str, key: str) -> bool:
        """Whether this task reads a key of a recipe."""
        if section == cls.name:
            return True
        keys = {**_OTHER_TASKS, **cls.reads}.get(section)
        return keys is None or key in keys


_OTHER_TASKS: dict[str, frozenset[str]] = {name: frozenset() for name in ("segment", "detect", "answer")}


#: Names of a model's classifier in the libraries.
HEADS = ("head", "head_dist", "fc", "classifier", "heads", "cls_classifier", "distillation_classifier")


def build_model(recipe: Recipe, arguments: dict[str, Any]) -> nn.Module:
    """The model of a recipe with these arguments, initialised from the seed, and from `model.weights` if given.

    Raises:
        VitfocusError: The recipe has an argument that is not on the allow-list, or the weights do not fit.
    """
    if recipe.model.spec.strip():
        base = split_library(split_spec(recipe.model.spec)[0])
        file_arguments(*base, recipe.model.arguments, "model.arguments")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.engine.seed)
        model = create_model(recipe.model.spec, recipe.model.pretrained, **arguments)
    if recipe.model.weights:
        start_from(model, recipe.model.weights)
    return model


def model_arguments(recipe: Recipe, classes: int) -> dict[str, Any]:
    """Arguments of the model's constructor: the number of classes, and the image size if it is not the default.

    Composed models, such as segmenters, accept images of any size and get no image size.
    """
    library, name = split_library(split_spec(recipe.model.spec)[0])
    given = dict(recipe.model.arguments)
    if library == "transformers":
        return {"num_labels": classes, **given}
    arguments: dict[str, Any] = {"num_classes": classes}
    if library != "torchvision":
        import timm

        import vitfocus.models  # noqa: F401  registers FAN, RVT, PVT and LocalViT

        usual = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
        side = recipe.data.enlarge or recipe.data.size
        unusual = library == "timm" and usual is not None and usual.input_size[-1] != side
        # Models for any size, such as timm's PVTv2, take no image size.
        ours = unusual and timm.model_entrypoint(name).__module__.startswith("vitfocus.")
        if unusual and usual is not None and (usual.fixed_input_size or ours):
            arguments["img_size"] = side
        if recipe.model.drop_path:
            arguments["drop_path_rate"] = recipe.model.drop_path
    return {**arguments, **given}


def start_from(model: nn.Module, source: str) -> None:
    """Load weights from a file or a saved folder; a classifier with another number of classes is not loaded.

    A model with a vision transformer inside, such as a segmenter, also accepts the weights of that transformer: its
    classifier is left out, and its position embedding is resized as its library does.
    """
    known: list[str] = []
    if not Path(source).exists():
        place = Path(source).parts
        first = f"train it first (vitfocus train {place[1]}), or " if place[::2] == ("runs", "model") else ""
        raise VitfocusError(f"There is no {source} to start from: {first}name other weights with model.weights=PATH.")
    if is_folder(source):
        saved = load(Path(source))
        tensors = saved.state_dict()
        known = [str(treatment) for treatment in applied(saved) if str(treatment) not in inserted(saved)]
    else:
        tensors = read_weights(Path(source))
    current = model.state_dict()
    tensors = unnest_checkpoint(tensors, current)
    if not is_folder(source):
        known = [str(treatment) for treatment in recorded_treatments(tensors, source)]
    tensors = {name: tensor for name, tensor in tensors.items() if not is_record(name)}
    if not set(tensors) & set(current):
        try:
            root = anatomy(model).root
        except VitfocusError:
            root = model
        if root is not model:
            _start_backbone(model, root, tensors, source, known)
            return
    heads = {name for name in current if name.split(".")[0] in HEADS}
    other = {name for name in heads if name in tensors and tensors[name].shape != current[name].shape}
    kept = {name: value for name, value in tensors.items() if name not in other}
    report = load_weights(model, kept, strict=not other, trained_with=known)
    wrong = [name for name in (*report.missing, *report.unexpected) if name not in other]
    if wrong:
        raise VitfocusError(f"{source} does not fit {type(model).__name__}: {', '.join(wrong[:4])}.")


def _start_backbone(model: nn.Module, root: nn.Module, tensors: dict[str, Any], source: str, known: list[str]) -> None:
    """Load the weights of the transformer inside; those of removed parts, such as a classifier, are ignored."""
    report = load_weights(root, tensors, strict=False, trained_with=known)
    parts = {name.split(".")[0] for name in root.state_dict()}
    leftover = [name for name in report.unexpected if name.split(".")[0] in parts]
    if report.missing or leftover or not report.loaded:
        raise VitfocusError(
            f"{source} does not fit the {type(root).__name__} inside {type(model).__name__}: "
            f"{', '.join([*report.missing, *leftover][:4]) or 'no name agrees'}."
        )
