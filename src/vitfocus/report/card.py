"""A model's card: what it is made of, what was treated where, what it costs.

A card is written (`card.json`) when a run ends and its model is at hand, so that a report needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vitfocus.anatomy import anatomy, inserted
from vitfocus.core.contents import check_contents
from vitfocus.core.errors import VitfocusError
from vitfocus.core.files import write_text
from vitfocus.report.cost import measure, multiply_adds, usual_batch
from vitfocus.robustness.pixels import weights_digest
from vitfocus.robustness.runfolder import read_json
from vitfocus.treatments import applied
from vitfocus.treatments.placement import placements

CARD = "card.json"
Card = dict[str, Any]
Shape = dict[str, Any]

#: The shape of card.json.
_TIMES = {"median": float, "range": [float, float]}
_COST: Shape = {**dict.fromkeys(("device", "torch", "dtype"), str), "batch": int, "memory_bytes": float}
_COST |= {"forward_seconds": _TIMES, "step_seconds": _TIMES}
_BLOCK: Shape = {
    **dict.fromkeys(("depth", "stage", "width"), int),
    "name": str,
    "kind": str,
    "mlp": bool,
    "grid": [int, int],
}
_BLOCK |= {"treated": [{"treatment": str, "spec": str, "place": str}]}
_CARD: Shape = {"digest?": (str, None), "treatments": [str], "inserted?": str, "parameters?": int}
_CARD |= {"multiply_adds?": float, "blocks?": [_BLOCK], "cost?": _COST}
SHAPE = {"models": {"*": _CARD}}


def make_card(model: nn.Module, timed: bool = True) -> Card:
    """Everything a report says of a model itself, as plain data.

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
    except VitfocusError:  # a model without blocks can be measured on a suite; it has no more to tell
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
    if timed and (cost := measure(model, usual_batch(next(model.parameters()).device, count))):
        card["cost"] = cost
    return card


def write_cards(folder: str | Path, models: Mapping[str, nn.Module]) -> dict[str, Card]:
    """Keep the cards of some models in a run's folder, by the names they have there."""
    cards = {name: make_card(model) for name, model in models.items()}
    write_text(Path(folder) / CARD, json.dumps({"models": cards}, indent=1) + "\n")
    return cards


def read_cards(folder: Path) -> dict[str, Card]:
    """The cards in a run's folder by name; none where there is no such file."""
    if not (folder / CARD).is_file():
        return {}
    content = read_json(folder / CARD)
    check_contents(folder / CARD, content, SHAPE, "vitfocus", "remove it, and the report does without")
    cards: dict[str, Card] = content["models"]
    return cards
