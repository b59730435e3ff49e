"""Anatomy: where the blocks, MLPs, attention modules, token grid and prefix tokens of a model are."""

from vitfocus.anatomy.block import Anatomy as Anatomy
from vitfocus.anatomy.block import Block as Block
from vitfocus.anatomy.block import GridRule as GridRule
from vitfocus.anatomy.block import Plan as Plan
from vitfocus.anatomy.block import Port as Port
from vitfocus.anatomy.block import Trunk as Trunk
from vitfocus.anatomy.registry import Family as Family
from vitfocus.anatomy.registry import InputSpec as InputSpec
from vitfocus.anatomy.registry import anatomy as anatomy
from vitfocus.anatomy.registry import build_example as build_example
from vitfocus.anatomy.registry import families as families
from vitfocus.anatomy.registry import input_spec as input_spec
from vitfocus.anatomy.registry import model_names as model_names
from vitfocus.anatomy.registry import register as register
from vitfocus.anatomy.registry import remember_normalising as remember_normalising
from vitfocus.anatomy.registry import unwrap as unwrap
