"""The autotuner: the fastest configuration for a script, a model and a machine, by prediction and a few experiments.

    dsx launch --autotuning tune train.py --deepspeed_config dsx.json

In order of reading: `space` (what can be tried), `predictions` (what will fit, and how long it will take), `tuners` and
`surrogate` (what is tried next), `experiments` (one start of the script), `journal` (going on after a kill), `search`
(all of it), `results` and `plot` (what is shown). The engine's side is `dsx_plan.trials` and `trial_session`; there
`probe` asks the planner. The section's keys are in `dsx_plan.section`.

Nothing here imports torch, except `probe`. Left out: changing the model or the data, tuning a learning rate.
"""

from .errors import AutotuningError
from .experiments import Job
from .results import Result
from .search import Autotuner

__all__ = ["Autotuner", "AutotuningError", "Job", "Result"]
