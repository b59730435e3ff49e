"""Treatments: what is inserted into a model, where, and how it is taken out again."""

from vitfocus.treatments.attention_diversification import AttentionDiversification, auxiliary_loss
from vitfocus.treatments.base import TREATMENTS, Treatment, all_treatments, keywords
from vitfocus.treatments.context_broadcasting import ContextBroadcasting
from vitfocus.treatments.extra_block import ExtraBlock
from vitfocus.treatments.squeeze_excitation import SqueezeExcitation
from vitfocus.treatments.surgery import applied, treat_, untreat_, untreated
from vitfocus.treatments.token_aware_pooling import TokenAwarePooling
from vitfocus.treatments.uniform_head import UniformHead

__all__ = [
    "TREATMENTS",
    "AttentionDiversification",
    "ContextBroadcasting",
    "ExtraBlock",
    "SqueezeExcitation",
    "TokenAwarePooling",
    "Treatment",
    "UniformHead",
    "all_treatments",
    "applied",
    "auxiliary_loss",
    "keywords",
    "treat_",
    "untreat_",
    "untreated",
]
