"""ZeRO stages 0-3 for any PyTorch model and optimizer.

model, optimizer = dsx_zero.shard(model, lambda params: torch.optim.AdamW(params, lr=3e-4), stage=2)
loss = model(x).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from ._version import __version__
from .api import shard
from .errors import ZeroConfigError, ZeroError, ZeroModelError, ZeroOptimizerError, ZeroStateError
from .optimizer import StepOutcome, ZeroOptimizer
from .precision import Precision
from .reduction import Reduction

__all__ = [
    "Precision",
    "Reduction",
    "StepOutcome",
    "ZeroConfigError",
    "ZeroError",
    "ZeroModelError",
    "ZeroOptimizer",
    "ZeroOptimizerError",
    "ZeroStateError",
    "__version__",
    "shard",
]
