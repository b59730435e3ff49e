"""The interface between the training engine and a task: data, model, batches, loss terms and scores.

The engine calls `open_data`, `build_model` and `start`, and then `iterate`, `terms` and `evaluate` at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from vitfocus.anatomy import anatomy
from vitfocus.core.errors import VitfocusError, reason
from vitfocus.core.modules import eval_mode
from vitfocus.data.loader import BatchPartition, BrokenLog
from vitfocus.treatments import AttentionDiversification, applied, auxiliary_loss

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.recipes.settings import Recipe


@dataclass(frozen=True)
class RunContext:
    """Where a run takes place: its device, this process's rows of a batch, and whether the model is compiled.

    `until_stopped` passes the batches of an evaluation on and raises an error if the run was asked to stop.
    """

    device: torch.device
    partition: BatchPartition
    compiled: bool = False
    say: Callable[[str], None] = print
    until_stopped: Callable[[Iterable[Any]], Iterator[Any]] = iter


class RecordableBatches(Protocol):
    """Batches whose making can be captured in a CUDA graph: inputs that differ by step, and operations that do not."""

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """Tensors on the device, with the same shapes for every step."""

    @property
    def make(self) -> Callable[..., Any]:
        """Makes the batch from the inputs without reading any value on the host."""


class Task(ABC):
    """One task of one recipe. `start` must set `train_images`, `val_images` and `names`."""

    name: ClassVar[str]
    best: ClassVar[str]  # the score by which the best model is chosen; higher is better
    #: Keys of a recipe's shared sections that this task reads; sections that are missing here are read completely.
    reads: ClassVar[Mapping[str, frozenset[str]]] = {}
    compiles: ClassVar[bool] = True  # whether engine.compile=auto compiles the model on a GPU

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.classes: list[str] = []
        self.train_images = self.val_images = 0
        self.names: list[str] = []  # of the loss terms, in the order of `terms`
        self.broken = {split: BrokenLog(recipe.data.broken == "fatal") for split in ("train", "val")}

    @abstractmethod
    def open_data(self) -> None:
        """Open the training and validation data and set `classes`; an error says what is missing."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, initialised from the recipe's seed, and from `model.weights` if given."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor in `model.spec`, from which a saved model is built again."""

    @abstractmethod
    def start(self, model: nn.Module, context: RunContext) -> None:
        """Prepare batches, losses and evaluation data; `model` is on the device and not wrapped."""

    @abstractmethod
    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """This process's parts of the steps from start to stop; each depends on (seed, step) only."""

    def recordable(self) -> RecordableBatches | None:
        """The batches, if a whole step can be captured in a CUDA graph."""
        return None

    @abstractmethod
    def terms(self, model: nn.Module, batch: Any, epoch: float) -> list[Tensor]:
        """Run the (wrapped) model on one part; the loss terms in the order of `names`; their sum is the loss."""

    def first_pass(self, model: nn.Module, batch: Any) -> Tensor | None:
        """The loss of an additional pass, run backward before `terms`; it is the last of `names` where there is one."""
        return None

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Scores on the validation data over all processes, accuracies in [0, 1]; every process returns the same.

        The model's mode is restored. Batches go through `RunContext.until_stopped`.
        """

    @abstractmethod
    def headline(self, scores: Mapping[str, float]) -> str:
        """The scores in one line, for people."""

    def sample_images(self, count: int) -> Any:
        """At most `count` validation images as `vitfocus.diagnose` takes them; None if the task has none."""
        return None

    @torch.no_grad()
    def try_model(self, model: nn.Module, size: int, call: Callable[[Tensor], Any]) -> None:
        """Run the model on one black image of the recipe's size, so that a misfit is an error before training.

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
        return {}

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
        keys = {**_FOREIGN, **cls.reads}.get(section)
        return keys is None or key in keys


_FOREIGN: dict[str, frozenset[str]] = {name: frozenset() for name in ("segment", "detect", "answer")}


@dataclass
class DiversityTerm:
    """The loss term of Attention Diversification if the model has it, with a linear warm-up."""

    model: nn.Module
    warmup_epochs: float = 0.0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = ["adl"] * any(isinstance(one, AttentionDiversification) for one in applied(self.model))

    def __call__(self, epoch: float) -> list[Tensor]:
        """The term of the last forward pass, or an empty list."""
        if not self.names:
            return []
        rise = self.warmup_epochs
        return [auxiliary_loss(self.model) * (min(1.0, epoch / rise) if rise else 1.0)]
