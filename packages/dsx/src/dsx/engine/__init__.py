"""The training engine: `dsx.initialize` builds one (`entry.py`, `wiring.py`), `Engine` is its type.

Map:

* `engine.py` has the three calls of a step. Its base classes: `accessors.py` (questions),
  `as_module.py` (the engine as an `nn.Module`), `by_hand.py`, `checkpoints.py`, `saving.py`. `pipeline.py` is the
  engine of a pipeline, with `shared_weights.py` and `pipeline_times.py`.
* `parts.py` lists the parts of an engine, most of them with a null object: `accumulation.py`, `backwards.py`,
  `stepper.py`, `schedule.py`, `inputs.py`. `watch.py` is what extensions add: `efficiency.py`, `clock.py`, `hooks.py`,
  `observers.py`, `sessions.py`.
  `request.py` has the caller's arguments.
* Checkpoints: `checkpointing.py` saves and loads; `training_state.py`, `hyperparameters.py`, `randomness.py`,
  `registered.py` and `places.py` are what it saves besides tensors; `gate.py` and `preemption.py` stop all ranks
  together; `weights.py` gathers full weights.
"""

from .engine import Engine
from .errors import EngineArgumentError, EngineError
from .report import StepReport

__all__ = ["Engine", "EngineArgumentError", "EngineError", "StepReport"]
