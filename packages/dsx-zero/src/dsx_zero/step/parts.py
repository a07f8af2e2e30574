"""May an optimizer be stepped in parts: some of its parameters now, others later in the same step?

That is safe if its rule treats each parameter alone, and if it keeps no step count outside of the parameters' states.
Torch's element-wise optimizers and those that offer `step_flat` are known to be safe; any other optimizer can say so
with `steps_in_parts = True`. The rest are stepped in one call, as their authors expect.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..grads.averaging import averages_itself

__all__ = ["has_step_hooks", "may_be_cut", "why_at_once"]

_TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


def why_at_once(inner: Any) -> str | None:
    """The reason why all masters must be stepped in one call; None where there is no such reason."""
    name = type(inner).__name__
    if averages_itself(inner):
        return f"{name} communicates by itself"
    if hasattr(inner, "norm_reducer") or getattr(inner, "needs_tensor_norms", False):
        return f"{name} sums the norms of all tensors in one message"
    if type(inner).__module__.startswith("torch.optim") and name in _TORCH:
        return None
    if getattr(inner, "steps_in_parts", False) or hasattr(inner, "step_flat"):
        return None
    return f"{name} does not say that it can be stepped in parts (steps_in_parts = True)"


def may_be_cut(inner: Any) -> bool:
    """May a parameter be stepped in pieces, each with states of its own? Only if its rule is element-wise."""
    return why_at_once(inner) is None and getattr(inner, "elementwise", True)


def has_step_hooks(inner: Any) -> bool:
    """Has the optimizer hooks, which expect one call of `step` per step?"""
    return bool(
        getattr(inner, "_optimizer_step_pre_hooks", None)
        or getattr(inner, "_optimizer_step_post_hooks", None)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
