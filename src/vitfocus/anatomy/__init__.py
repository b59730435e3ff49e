"""Anatomy: where a model's blocks, MLPs, attentions, token grid and prefix tokens are."""

from vitfocus.anatomy.block import Anatomy, Block, GridRule, Plan, Port, Trunk
from vitfocus.anatomy.registry import (
    Family,
    Pixels,
    anatomy,
    build_example,
    families,
    model_names,
    pixels_of,
    register,
    remember_normalising,
    unwrap,
)

__all__ = [
    "Anatomy",
    "Block",
    "Family",
    "GridRule",
    "Pixels",
    "Plan",
    "Port",
    "Trunk",
    "anatomy",
    "build_example",
    "families",
    "model_names",
    "pixels_of",
    "register",
    "remember_normalising",
    "unwrap",
]
