"""Treatments: what is inserted into a model, where, and how it is taken out again."""

from vitfocus.treatments.base import Treatment
from vitfocus.treatments.context import ContextBroadcasting
from vitfocus.treatments.diversity import AttentionDiversification, auxiliary_loss
from vitfocus.treatments.extra_block import ExtraBlock
from vitfocus.treatments.pooling import TokenAwarePooling
from vitfocus.treatments.squeeze import SqueezeExcitation
from vitfocus.treatments.surgery import applied, treat_, untreat_, untreated
from vitfocus.treatments.uniform_head import UniformHead

__all__ = [
    "AttentionDiversification",
    "ContextBroadcasting",
    "ExtraBlock",
    "SqueezeExcitation",
    "TokenAwarePooling",
    "Treatment",
    "UniformHead",
    "applied",
    "auxiliary_loss",
    "treat_",
    "untreat_",
    "untreated",
]
