"""Model cards (`card.json`): what a model is made of, where its treatments are, and what it costs.

A card is written when a run ends and its model is in memory, so that a report needs no model. Multiply-adds are
counted; time and memory are measured, and left out if the model needs more than images or does not fit into memory.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitfocus.anatomy import anatomy, inserted, unwrap
from vitfocus.core.contents import check_contents
from vitfocus.core.environment import device_name
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.core.modules import eval_mode
from vitfocus.robustness.pixel_model import weights_digest
from vitfocus.robustness.run_folder import read_json
from vitfocus.treatments import applied
from vitfocus.treatments.cost import count_cost
from vitfocus.treatments.placement import placements
from vitfocus.treatments.step_cost import Step, memory, timed

CARD = "card.json"
Card = dict[str, Any]

#: The shape of card.json.
_TIMES = {"median": float, "range": [float, float]}
_COST: Card = {**dict.fromkeys(("device", "torch", "dtype"), str), "batch": int, "memory_bytes": float}
_COST |= {"forward_seconds": _TIMES, "step_seconds": _TIMES}
_BLOCK: Card = {**dict.fromkeys(("depth", "stage", "width"), int), **dict.fromkeys(("name", "kind"), str)}
_BLOCK |= {"mlp": bool, "grid": [int, int], "treated": [{"treatment": str, "spec": str, "place": str}]}
_CARD: Card = {"digest?": (str, None), "treatments": [str], "inserted?": str, "parameters?": int}
_CARD |= {"multiply_adds?": float, "blocks?": [_BLOCK], "cost?": _COST}
SHAPE = {"models": {"*": _CARD}}

#: At most this many timed steps, and no new one after this many seconds.
_REPEATS, _SECONDS = 7, 2.0


def make_card(model: nn.Module, timed: bool = True) -> Card:
    """Everything a report says about a model itself, as plain data.

    >>> import vitfocus as vf
    >>> card = make_card(vf.create_model("vit_tiny_patch16_224+cb(layers=upper)", depth=2, img_size=32), timed=False)
    >>> [block["treated"] for block in card["blocks"]]
    [[], [{'treatment': 'cb', 'spec': 'cb(layers=upper)', 'place': 'mlp.end'}]]
    """
    card: Card = {
        "digest": weights_digest(model),
        "treatments": [str(treatment) for treatment in applied(model)],
        **({"inserted": "+".join(since)} if (since := inserted(model)) else {}),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    try:
        body = anatomy(model)
    except VitfocusError:  # a model without known blocks can still be evaluated; its card ends here
        return card
    card["family"], card["size"] = body.family, list(body.build_size)
    card["blocks"] = [
        {
            "name": block.name,
            "depth": block.depth,
            "stage": block.stage,
            "width": block.width,
            "grid": list(block.grid()),
            "kind": block.attention_kind,
            "mlp": block.mlp is not None,
            "treated": [],
        }
        for block in body
    ]
    by_name = {block["name"]: block for block in card["blocks"]}
    for placed in placements(model):
        treated = {"treatment": placed.treatment.name, "spec": str(placed.treatment), "place": placed.place}
        by_name[placed.block]["treated"].append(treated)
    if (count := multiply_adds(model)) is not None:
        card["multiply_adds"] = count
    if timed and (cost := measure_cost(model, _batch_size(next(model.parameters()).device, count))):
        card["cost"] = cost
    return card


def write_cards(folder: str | Path, models: Mapping[str, nn.Module]) -> dict[str, Card]:
    """Save the cards of some models, by name, in a run's folder."""
    cards = {name: make_card(model) for name, model in models.items()}
    write_text(Path(folder) / CARD, json.dumps({"models": cards}, indent=1) + "\n")
    return cards


def read_cards(folder: Path) -> dict[str, Card]:
    """The cards in a run's folder by model name; empty if there is no such file."""
    if not (folder / CARD).is_file():
        return {}
    content = read_json(folder / CARD)
    check_contents(folder / CARD, content, SHAPE, "vitfocus", "remove it, and the report omits what it says")
    cards: dict[str, Card] = content["models"]
    return cards


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


def measure_cost(model: nn.Module, batch: int = 8) -> dict[str, Any]:
    """Seconds per forward pass and per training step, the memory of a step, and the hardware.

    A copy of the model is trained, so the model itself is unchanged. Empty if the model cannot be run on images.
    """
    device = next(model.parameters()).device
    try:
        images = _images(model, batch)
        with eval_mode(model):
            forward = _times(Step(model, images, "infer"))
        training = Step(copy.deepcopy(unwrap(model)), images, "train")
        step, taken = _times(training), memory(training)
    except Exception:  # the model takes more than an image, or memory is too small
        return {}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "batch": batch,
        "forward_seconds": forward,
        "step_seconds": step,
        "memory_bytes": taken,
    }


def _batch_size(device: torch.device, multiply_adds: int | None) -> int:
    """Large enough for a meaningful time, small enough to finish quickly."""
    if device.type == "cuda":
        return 32
    return 8 if (multiply_adds or 0) < 20_000_000_000 else 1


def _images(model: nn.Module, batch: int) -> Tensor:
    """Noise of the model's own size, from a generator of its own so that the global one is not advanced."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    body = anatomy(model)
    noise = torch.randn(batch, len(body.mean), *body.build_size, generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, weight.dtype)


def _times(step: Step) -> dict[str, Any]:
    """Median, minimum and maximum seconds of some steps, after one warm-up step."""
    step()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < _REPEATS and (not seconds or time.perf_counter() - began < _SECONDS):
        seconds.append(timed(step))
    return {"median": statistics.median(seconds), "range": [min(seconds), max(seconds)], "runs": len(seconds)}
