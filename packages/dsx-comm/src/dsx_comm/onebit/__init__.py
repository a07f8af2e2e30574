"""Optimizers that communicate in one bit: 1-bit Adam, 0/1 Adam, 1-bit LAMB.

schedule, volume   what each step sends                    (arithmetic)
arithmetic         moments, roots, directions              (lists of tensors)
arena              the flat buffer and its errors          (parameters)
base, checks       clock, gradients, masks, saving; arguments
amp, engine_switch what a GradScaler and an engine with a flag have to do with a step
adam, zero_one, lamb
rules              what they ask of a configuration or an engine around them
report             what a step has sent
"""

from .adam import OneBitAdam
from .lamb import OneBitLamb
from .schedule import StepKind, ZeroOnePolicy
from .volume import Rounds, StepTraffic, onebit_rounds, zero_one_rounds
from .zero_one import ZeroOneAdam

OnebitAdam = OneBitAdam
"""The name that DeepSpeed's class has; configurations write `OneBitAdam`."""
OnebitLamb = OneBitLamb
"""The name that DeepSpeed's class has; configurations write `OneBitLamb`."""

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "OnebitAdam",
    "OnebitLamb",
    "Rounds",
    "StepKind",
    "StepTraffic",
    "ZeroOneAdam",
    "ZeroOnePolicy",
    "onebit_rounds",
    "zero_one_rounds",
]
