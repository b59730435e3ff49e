"""Treatments: what is inserted into a model, where, and how it is removed."""

from vitfocus.treatments.attention_diversification import AttentionDiversification as AttentionDiversification
from vitfocus.treatments.attention_diversification import auxiliary_loss as auxiliary_loss
from vitfocus.treatments.attention_gate import AttentionGate as AttentionGate
from vitfocus.treatments.base import TREATMENTS as TREATMENTS
from vitfocus.treatments.base import Treatment as Treatment
from vitfocus.treatments.base import all_treatments as all_treatments
from vitfocus.treatments.base import keywords as keywords
from vitfocus.treatments.baselines import ExtraBlock as ExtraBlock
from vitfocus.treatments.baselines import SqueezeExcitation as SqueezeExcitation
from vitfocus.treatments.baselines import UniformHead as UniformHead
from vitfocus.treatments.context_broadcasting import ContextBroadcasting as ContextBroadcasting
from vitfocus.treatments.query_key_norm import QueryKeyNorm as QueryKeyNorm
from vitfocus.treatments.registers import Registers as Registers
from vitfocus.treatments.sigma_reparam import SigmaReparam as SigmaReparam
from vitfocus.treatments.surgery import applied as applied
from vitfocus.treatments.surgery import treat_ as treat_
from vitfocus.treatments.surgery import untreat_ as untreat_
from vitfocus.treatments.surgery import untreated as untreated
from vitfocus.treatments.test_time_registers import TestTimeRegisters as TestTimeRegisters
from vitfocus.treatments.test_time_registers import find_registers as find_registers
from vitfocus.treatments.token_aware_pooling import TokenAwarePooling as TokenAwarePooling
