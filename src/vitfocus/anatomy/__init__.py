"""Anatomy: where a model's blocks, MLPs, attentions, token grid and prefix tokens are."""

from vitfocus.anatomy.block import Anatomy, Block, GridRule, Plan, Port, Trunk
from vitfocus.anatomy.registry import (
    Family,
    InputSpec,
    anatomy,
    build_example,
    families,
    input_spec,
    model_names,
    register,
    remember_normalising,
    unwrap,
)

__all__ = [
    "Anatomy",
    "Block",
    "Family",
    "GridRule",
    "InputSpec",
    "Plan",
    "Port",
    "Trunk",
    "anatomy",
    "build_example",
    "families",
    "input_spec",
    "model_names",
    "register",
    "remember_normalising",
    "unwrap",
]
