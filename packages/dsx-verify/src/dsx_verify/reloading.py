"""An update that is repeated from a checkpoint: what was saved has to come back, and the update has to be the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from .compare import magnitude
from .comparing import Judge
from .running import Audit
from .seen import watch_forward
from .system import scaler_state

__all__ = ["reload"]


def reload(
    audit: Audit, step: Callable[[list[Any]], Any], save: Callable[[str], None], load: Callable[[str], None]
) -> None:
    """Save, train one update, load, train it again: parameters must be the same after each of the two; and buffers,
    learning rates, optimizer states and the loss scale must come back.
    """
    folder = audit.ranks.gather(tempfile.mkdtemp(prefix="dsx-verify-"))[0]
    save(folder)
    saved, rates, scaler = _tensors(audit), audit.system.learning_rates(), scaler_state(audit.system)
    before = audit.system.parameters()
    audit.run(step)
    first = audit.observed.after
    audit.step_number -= 1
    load(folder)
    judge = Judge(audit.step_number, audit.ranks.rank)
    back = _tensors(audit)
    for name, value in {**audit.system.parameters(), **back}.items():
        right = {**before, **saved}.get(name)
        if right is None:
            judge.say("checkpoint", name, "was not there when the checkpoint was saved")
        else:
            judge.tensor("checkpoint", name, value, right, 0.0)
    for name in saved.keys() - back.keys():
        judge.say("checkpoint", name, "does not come back")
    for group, (got, right) in enumerate(zip(audit.system.learning_rates(), rates)):
        judge.numbers(audit.step_number, "checkpoint", f"learning rate of group {group}", got, right, 1e-9 * abs(right))
    judge.equal("checkpoint", "the loss scale and its counter", scaler_state(audit.system), scaler)
    audit.settle(judge, None)
    audit.draw()
    with audit.system.watch(audit.point), watch_forward(audit.system.module, audit.begin_pass):
        step(audit.micro_batches())
    judge = Judge(audit.step_number, audit.ranks.rank)
    for name, value in audit.system.parameters().items():
        change = magnitude(first[name].double() - before[name].double())
        judge.tensor("checkpoint", f"{name} after one more update", value, first[name], 1e-3 * change)
    audit.settle(judge, None)
    audit.ranks.gather(None)
    if audit.ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _tensors(audit: Audit) -> dict[str, torch.Tensor]:
    """This rank's buffers, and its part of the optimizer's states where the adapter gives them."""
    states = getattr(audit.system, "states", dict)()
    return {**{f"buffer {name}": value for name, value in audit.system.buffers().items()}, **states}
