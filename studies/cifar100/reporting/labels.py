"""Names that a reader understands, for groups and arms."""

from __future__ import annotations

MODELS = {
    "vit-ti": "ViT-Ti",
    "vit-s": "ViT-S",
    "heads": "ViT-Ti, other numbers of heads",
    "fine-tune": "DeiT-Ti, fine-tuned",
}

ARMS = {
    "plain": "plain",
    "cb-all": "CB, all layers",
    "cb-upper": "CB, upper half",
    "cbs": "CB_S",
    "cb-attention": "CB in attention",
    "cb-front": "CB at front",
    "se": "SE",
    "tap": "TAP",
    "adl": "ADL official",
    "adl-paper": "ADL paper",
    "tap-adl": "TAP + ADL",
    "cb-tap-adl": "CB + TAP + ADL",
    "cbs-tap-adl": "CB_S + TAP + ADL",
}

#: Group, plain arm and arm with CB by the number of heads.
HEADS = {
    1: ("heads", "plain-1", "cb-upper-1"),
    3: ("vit-ti", "plain", "cb-upper"),
    12: ("heads", "plain-12", "cb-upper-12"),
}


def label(arm: str) -> str:
    """An arm's name in words; an arm that is not planned keeps its own."""
    return ARMS.get(arm, arm)
