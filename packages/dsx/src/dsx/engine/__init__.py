"""The training engine: `dsx.initialize` builds one (`entry.py`, `wiring.py`), `Engine` is its type.

Files: `engine.py` the three calls of a step; `accessors.py` what can be asked; `saving.py`, `weights.py` whole weights;
`checkpointing.py`, `training_state.py` checkpoints, and what they hold beside tensors; `accumulation.py`, `stepper.py`,
`schedule.py`, `inputs.py`, `clock.py`, `observers.py` the parts, with a null object each; `parts.py` the list of parts;
`request.py` what the caller brought.
"""

from .engine import Engine
from .errors import EngineArgumentError, EngineError
from .report import StepReport

__all__ = ["Engine", "EngineArgumentError", "EngineError", "StepReport"]
