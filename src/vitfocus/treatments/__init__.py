"""Treatments: what is inserted into a model, where, and how it is taken out again."""

from vitfocus.treatments.attention_diversification import AttentionDiversification, auxiliary_loss
from vitfocus.treatments.attention_gate import AttentionGate
from vitfocus.treatments.base import TREATMENTS, Treatment, all_treatments, keywords
from vitfocus.treatments.context_broadcasting import ContextBroadcasting
from vitfocus.treatments.extra_block import ExtraBlock
from vitfocus.treatments.query_key_norm import QueryKeyNorm
from vitfocus.treatments.registers import Registers
from vitfocus.treatments.sigma_reparam import SigmaReparam
from vitfocus.treatments.squeeze_excitation import SqueezeExcitation
from vitfocus.treatments.surgery import applied, treat_, untreat_, untreated
from vitfocus.treatments.test_time_registers import TestTimeRegisters, find_registers
from vitfocus.treatments.token_aware_pooling import TokenAwarePooling
from vitfocus.treatments.uniform_head import UniformHead

__all__ = [
    "TREATMENTS",
    "AttentionDiversification",
    "AttentionGate",
    "ContextBroadcasting",
    "ExtraBlock",
    "QueryKeyNorm",
    "Registers",
    "SigmaReparam",
    "SqueezeExcitation",
    "TestTimeRegisters",
    "TokenAwarePooling",
    "Treatment",
    "UniformHead",
    "all_treatments",
    "applied",
    "auxiliary_loss",
    "find_registers",
    "keywords",
    "treat_",
    "untreat_",
    "untreated",
]
