"""Anatomy: where a model's blocks, MLPs, attentions, token grid and prefix tokens are."""

from vitfocus.anatomy.records import Anatomy, Block, GridRule, Port
from vitfocus.anatomy.registry import Family, anatomy, families, unwrap

__all__ = ["Anatomy", "Block", "Family", "GridRule", "Port", "anatomy", "families", "unwrap"]
