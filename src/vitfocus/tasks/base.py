"""What a run asks of its task: data, model, batches, loss terms, scores. The engine knows nothing else about it.

The order of calls is `open_data`, `build_model`, `start`, and then, step by step, `iterate`, `terms` and `evaluate`.
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
from vitfocus.data.classification.dataset import BrokenLog
from vitfocus.data.classification.loader import Share
from vitfocus.treatments import AttentionDiversification, applied, auxiliary_loss

if TYPE_CHECKING:
    from accelerate import Accelerator

    from vitfocus.recipes.settings import Recipe


@dataclass(frozen=True)
class Setting:
    """Where a run takes place: its device, the rows of a batch that are this process's, whether it is compiled.

    `until_stopped` passes the batches of an evaluation on and raises when the run was asked to stop.
    """

    device: torch.device
    share: Share
    compiled: bool = False
    say: Callable[[str], None] = print
    until_stopped: Callable[[Iterable[Any]], Iterator[Any]] = iter


class RecordableBatches(Protocol):
    """Batches in two halves: what distinguishes a step, small, and the making, the same for every step."""

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """Tensors on the device, of the same shapes for every step."""

    @property
    def make(self) -> Callable[..., Any]:
        """From those tensors, the batch, without a look at any value on the host."""


class Task(ABC):
    """One task of one recipe. Subclasses fill `train_images`, `val_images` and `names` by the time `start` is done."""

    name: ClassVar[str]
    best: ClassVar[str]  # the score whose rise makes a model the best so far
    #: Keys of a recipe's shared sections that this task reads; a section not named here is read wholly.
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
        """Open the training and validation data, or say what is missing from their folder; set `classes`."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, its random weights drawn from the recipe's seed, started from `model.weights` where given."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What the constructor named in `model.spec` is given, so that the model can be saved and built again."""

    @abstractmethod
    def start(self, model: nn.Module, setting: Setting) -> None:
        """Make ready to train `model` (on the device already, not wrapped): batches, losses, evaluation data."""

    @abstractmethod
    def iterate(self, start: int, stop: int) -> Generator[Any, None, None]:
        """This process's parts of the steps from start to stop, each a function of (seed, step) alone."""

    def recordable(self) -> RecordableBatches | None:
        """The batches, where their making is work on the device alone, so that a whole step can be recorded."""
        return None

    @abstractmethod
    def terms(self, model: nn.Module, batch: Any, epoch: float) -> list[Tensor]:
        """Call the (wrapped) model on one part; the loss terms in the order of `names`; their sum is the loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Scores on the validation data over all processes; shares lie in [0, 1]. The model's mode is left as it was.

        Every process must come out with the same scores. Batches go through `Setting.until_stopped`.
        """

    @abstractmethod
    def headline(self, scores: Mapping[str, float]) -> str:
        """The scores in a few words, for a person."""

    @torch.no_grad()
    def try_model(self, model: nn.Module, size: int, call: Callable[[Tensor], Any]) -> None:
        """Show the model one black image of the recipe's size, so that a misfit is said before anything is read.

        `call` gives it a (1, 3, size, size) tensor; the model is in eval mode meanwhile.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            return
        try:
            with eval_mode(model), torch.random.fork_rng(devices=[]):
                call(torch.zeros(1, 3, size, size))
        except VitfocusError:
            raise
        except Exception as error:  # whatever the library raises for images that it does not expect
            raise VitfocusError(
                f"{self.recipe.model.spec} does not take this recipe's images, (3, {size}, {size}): {reason(error)}; "
                "change data.size or model.arguments."
            ) from None

    def digests(self) -> dict[str, str]:
        """A SHA-256 of each split of the data."""
        return {}

    def card(self) -> dict[str, Any]:
        """What a saved model must remember of its task, as JSON; `treatments.save_load.task_of` reads it.

        The training run calls it after `build_model`.
        """
        return {"task": self.name, "classes": list(self.classes)}

    def facts(self) -> dict[str, Any]:
        """More for results.json."""
        return {}

    def head_names(self, model: nn.Module) -> set[str]:
        """Parameters that `optimiser.head_lr` is about: by default all outside the vision transformer."""
        try:
            inside: nn.Module = anatomy(model).root
        except VitfocusError:  # a backbone that is no transformer
            inside = next((module for module in model.modules() if getattr(module, "pretrained_cfg", None)), model)
        inner = {id(parameter) for parameter in inside.parameters()}
        return {name for name, parameter in model.named_parameters() if id(parameter) not in inner}

    @classmethod
    def uses(cls, section: str, key: str) -> bool:
        """Whether this task reads that key of a recipe."""
        if section == cls.name:
            return True
        keys = {**_FOREIGN, **cls.reads}.get(section)
        return keys is None or key in keys


_FOREIGN: dict[str, frozenset[str]] = {name: frozenset() for name in ("segment", "detect", "answer")}


@dataclass
class DiversityTerm:
    """The loss term of Attention Diversification where the model carries it, rising over the recipe's warm-up."""

    model: nn.Module
    warmup_epochs: float = 0.0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = ["adl"] * any(isinstance(one, AttentionDiversification) for one in applied(self.model))

    def __call__(self, epoch: float) -> list[Tensor]:
        """The term of the last forward pass, or none where the model is not diversified."""
        if not self.names:
            return []
        rise = self.warmup_epochs
        return [auxiliary_loss(self.model) * (min(1.0, epoch / rise) if rise else 1.0)]
