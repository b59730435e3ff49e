"""Model cards (`card.json`): the blocks of a model, where its treatments are, and its cost.

A card is written when a run ends and its model is in memory, so that a report does not load models. Multiply-adds are
counted. Time and memory are measured, unless the model needs more than images or does not fit into memory.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, unwrap
from vitfocus.core.environment import device_name
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import eval_mode, inserted
from vitfocus.core.records import Count, read_json, write_json
from vitfocus.robustness.pixel_model import weights_digest
from vitfocus.treatments import applied
from vitfocus.treatments.cost import Step, count_cost, memory, repeat_timed
from vitfocus.treatments.surgery import placements

CARD = "card.json"


class Times(msgspec.Struct):
    """Seconds of some steps."""

    median: float
    range: tuple[float, float]
    runs: Count = 0


class MeasuredCost(msgspec.Struct):
    """Time and memory of a step, and the hardware."""

    device: str
    torch: str
    dtype: str
    batch: Count
    forward_seconds: Times
    step_seconds: Times
    memory_bytes: float


class TreatedPlace(msgspec.Struct):
    """A place of a block that a treatment changed."""

    treatment: str
    spec: str
    place: str


class BlockCard(msgspec.Struct):
    """One block of a model."""

    name: str
    depth: Count
    stage: Count
    width: Count
    grid: tuple[Count, Count]
    kind: str
    mlp: bool
    treated: list[TreatedPlace]


class Card(msgspec.Struct, omit_defaults=True):
    """Facts about a model for reports."""

    treatments: list[str]
    digest: str | None = None
    inserted: str = ""
    parameters: Count | None = None
    family: str = ""
    size: tuple[Count, Count] | None = None
    blocks: list[BlockCard] = []
    multiply_adds: float | None = None
    cost: MeasuredCost | None = None


class Cards(msgspec.Struct):
    """card.json: the cards of the models in a folder, by name."""

    models: dict[str, Card]


#: The maximum number of timed steps, and the seconds after which no further one starts.
_REPEATS, _SECONDS = 7, 2.0


def make_card(model: nn.Module, timed: bool = True) -> Card:
    """Make the card of a model; `timed` also measures its time and memory.

    >>> import vitfocus as vf
    >>> card = make_card(vf.create_model("vit_tiny_patch16_224+cb(layers=upper)", depth=2, img_size=32), timed=False)
    >>> [[(one.spec, one.place) for one in block.treated] for block in card.blocks]
    [[], [('cb(layers=upper)', 'mlp.end')]]
    """
    card = Card(
        treatments=[str(treatment) for treatment in applied(model)],
        digest=weights_digest(model),
        inserted="+".join(inserted(model)),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    try:
        body = anatomy(model)
    except VitfocusError:  # a model without known blocks can still be evaluated; its card ends here
        return card
    card.family, card.size = body.family, body.build_size
    card.blocks = [
        BlockCard(
            name=block.name,
            depth=block.depth,
            stage=block.stage,
            width=block.width,
            grid=block.grid(),
            kind=block.attention_kind,
            mlp=block.mlp is not None,
            treated=[],
        )
        for block in body
    ]
    by_name = {block.name: block for block in card.blocks}
    for placed in placements(model):
        treated = TreatedPlace(placed.treatment.name, str(placed.treatment), placed.place)
        by_name[placed.block].treated.append(treated)
    card.multiply_adds = count = multiply_adds(model)
    if timed:
        card.cost = measure_cost(model, _batch_size(next(model.parameters()).device, count))
    return card


def write_cards(folder: str | Path, models: Mapping[str, nn.Module]) -> dict[str, Card]:
    """Save the cards of some models, by name, in a run's folder."""
    cards = {name: make_card(model) for name, model in models.items()}
    write_json(Path(folder) / CARD, Cards(cards), indent=1)
    return cards


def read_cards(folder: Path) -> dict[str, Card]:
    """The cards in a run's folder by model name; empty if there is no such file."""
    if not (folder / CARD).is_file():
        return {}
    return read_json(folder / CARD, Cards, hint="remove it, and the report omits what it says").models


def multiply_adds(model: nn.Module) -> int | None:
    """Multiply-adds for one image at the model's own size, as papers count "FLOPs"; None if it needs more than images.

    >>> import timm
    >>> round(multiply_adds(timm.create_model("vit_tiny_patch16_224")) / 1e9, 2)
    1.25
    """
    try:
        return count_cost(model).flops
    except Exception:  # the model takes more than an image
        return None


def measure_cost(model: nn.Module, batch: int = 8) -> MeasuredCost | None:
    """Seconds per forward pass and per training step, the memory of a step, and the hardware.

    A copy of the model is trained, so the model itself is unchanged. None if the model cannot be run on images.
    """
    device = next(model.parameters()).device
    try:
        images = _images(model, batch)
        with eval_mode(model):
            forward = _times(Step(model, images, "infer"))
        training = Step(copy.deepcopy(unwrap(model)), images, "train")
        step, taken = _times(training), memory(training)
    except Exception:  # the model takes more than an image, or memory is too small
        return None
    return MeasuredCost(
        device=device_name(device),
        torch=str(torch.__version__),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        batch=batch,
        forward_seconds=forward,
        step_seconds=step,
        memory_bytes=taken,
    )


def _batch_size(device: torch.device, multiply_adds: int | None) -> int:
    """Large enough for a meaningful time, but small enough to be quick."""
    if device.type == "cuda":
        return 32
    return 8 if (multiply_adds or 0) < 20_000_000_000 else 1


def _images(model: nn.Module, batch: int) -> Tensor:
    """Noise of the model's own size, from a separate generator so that the global one is not advanced."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    body = anatomy(model)
    noise = torch.randn(batch, len(body.mean), *body.build_size, generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, weight.dtype)


def _times(step: Step) -> Times:
    """Median, minimum and maximum seconds of some steps, after one warm-up step."""
    seconds = repeat_timed(step, step.images.device, _REPEATS, _SECONDS)
    return Times(statistics.median(seconds), (min(seconds), max(seconds)), len(seconds))
