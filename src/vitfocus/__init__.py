"""Shows where a vision transformer looks, mends it, and proves the difference."""

from vitfocus.anatomy import anatomy
from vitfocus.errors import VitfocusError
from vitfocus.treatments import (
    AttentionDiversification,
    ContextBroadcasting,
    ExtraBlock,
    SqueezeExcitation,
    TokenAwarePooling,
    UniformHead,
    applied,
    auxiliary_loss,
    treat_,
    untreat_,
    untreated,
)
from vitfocus.treatments.store import create_model, load, push, save
from vitfocus.treatments.weights import load_weights

__version__ = "0.1.0"

__all__ = [
    "AttentionDiversification",
    "ContextBroadcasting",
    "ExtraBlock",
    "SqueezeExcitation",
    "TokenAwarePooling",
    "UniformHead",
    "VitfocusError",
    "anatomy",
    "applied",
    "auxiliary_loss",
    "create_model",
    "load",
    "load_weights",
    "push",
    "save",
    "treat_",
    "untreat_",
    "untreated",
]
