"""Optimizers that communicate in one bit: 1-bit Adam, 0/1 Adam, 1-bit LAMB.

schedule, volume   what each step sends                    (arithmetic)
arithmetic         moments, roots, directions              (lists of tensors)
arena              the flat buffer and its errors          (parameters)
base, checks       clock, gradients, masks, saving; arguments
adam, zero_one, lamb
gate, report       does it pay?
"""

from .adam import OneBitAdam
from .gate import Estimate, Link
from .lamb import OneBitLamb
from .report import StepTraffic
from .schedule import StepKind, ZeroOnePolicy
from .volume import Rounds, onebit_rounds, zero_one_rounds
from .zero_one import ZeroOneAdam

__all__ = [
    "Estimate",
    "Link",
    "OneBitAdam",
    "OneBitLamb",
    "Rounds",
    "StepKind",
    "StepTraffic",
    "ZeroOneAdam",
    "ZeroOnePolicy",
    "onebit_rounds",
    "zero_one_rounds",
]
