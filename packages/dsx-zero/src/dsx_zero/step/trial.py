"""Trials of an optimizer on sample tensors: may its step be divided among ranks?

Classes of other packages do not say whether they go element by element. So a copy of the optimizer steps a small
matrix, and other copies step the same elements in two slices, as two ranks would. If the results differ (a factored
moment, a preconditioner, a norm of the tensor in the step), or a state is neither numbers nor one value per element,
the optimizer gets whole tensors; slices would be another method, without an error. It is also asked whether the step
of one tensor depends on others (a step size from all gradients): ranks step different tensors, so that is refused.
Gradients have a common part, so that step sizes grow, and it is orthogonal to the rows of the matrix, for rules that
look at that. An optimizer whose copy fails gets whole tensors.

A copy shares nothing that a step changes: no parameters, states, hooks or settings, and the random numbers of torch,
NumPy and Python go on from where they were.

Left out: torch's own classes and those that keep their `step`, which are known (`masters.py`), and optimizers that say
it (`needs_whole_tensors`) or know of slices. What a rule does only after `_STEPS` steps, or only with matrices larger
than `_SHAPE`, is not seen; the known classes of this kind stand in `masters.py`.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ZeroOptimizerError
from .masters import is_known

__all__ = ["check_divisible", "probe_of", "step_of"]

_SHAPE, _EDGE, _STEPS = (40, 36), 700, 6
"""Of the sample; the element between its slices, inside a row; steps of a trial."""
_RATE = 1e-2
"""The least learning rate of a trial: that of a warm-up may be 0, and small changes are lost in rounding."""
_LULL, _LOW = 3, 0.02
"""The step of a trial whose gradients are small, and how small: some rules look for a drop."""
_ANY_VALUE = ("lr", "initial_lr", "param_names")
"""Settings of groups that make no other rule."""
_TELLING = ("state_template", "new_flat_state", "of_matrix", "state_block")
"""Attributes of optimizers that know of slices."""


def check_divisible(optimizer: Any, *, ranks: int) -> None:
    """Note on an optimizer of an unknown class that it needs whole tensors (`needs_whole_tensors`), if it does or
    cannot be tried.

    Args:
        ranks: those that divide its masters.

    Raises:
        ZeroOptimizerError: the step of one tensor depends on others, or does not step what is in the groups.
    """
    if is_known(optimizer) or any(hasattr(optimizer, name) for name in _TELLING):
        return
    asked = list[str]()
    for number, group in enumerate(optimizer.param_groups):
        text = repr({key: value for key, value in group.items() if key not in ("params", *_ANY_VALUE)})
        if text in asked or not group["params"]:
            continue
        asked.append(text)
        trial = _Trial(optimizer, number, group["params"][0].device)
        if trial.moves_nothing():
            raise ZeroOptimizerError(
                f"{type(optimizer).__name__}: {_STEPS} trial steps changed nothing of a tensor in"
                f" param_groups[{number}]. A sharded optimizer steps tensors that take the parameters' places in its"
                " groups; one that keeps lists of parameters of its own would never step them. Use another optimizer;"
                " if it only starts later, say so: optimizer.needs_whole_tensors = True (False where it goes element"
                " by element)"
            )
        if ranks > 1 and trial.depends_on_others():
            raise ZeroOptimizerError(
                f"{type(optimizer).__name__}: the step of one parameter depends on the others in its group, and ranks"
                " step different parameters; use stage 0, or another optimizer. If that is not so, say it:"
                " optimizer.needs_whole_tensors = True, or False where it goes element by element"
            )
        if trial.goes_by_whole_tensors():
            optimizer.needs_whole_tensors = True


def probe_of(optimizer: Any, number: int, params: Sequence[torch.Tensor]) -> Any:
    """A copy without hooks, which holds these parameters in its group `number` and none in the others.

    Attributes are copied one by one; one that cannot be (a process group, a stream) is shared.
    """
    probe = object.__new__(type(optimizer))
    elsewhere = torch.nn.Parameter(torch.empty(0, device="cpu"))  # for what holds parameters beside the groups
    memo: dict[int, Any] = {id(optimizer): probe}
    of_all = {k: copy.deepcopy(v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    memo[id(optimizer.state)] = defaultdict(dict, of_all)
    memo |= {id(p): elsewhere for group in optimizer.param_groups for p in group["params"]}
    for key, value in vars(optimizer).items():
        if key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            probe.__dict__[key] = OrderedDict()
        elif key != "step":  # schedulers set one on the object
            probe.__dict__[key] = _copied(value, memo)
    for place, group in enumerate(probe.param_groups):
        group["params"] = list(params) if place == number else []
    if hasattr(probe, "norm_reducer"):
        probe.norm_reducer = None
    given = optimizer.param_groups[number]["params"]
    made = dict(optimizer.state.get(given[0]) or {}) if given else {}
    if made and all(isinstance(value, (int, float)) for value in made.values()):  # by a constructor, such as a seed
        probe.state.update({param: dict(made) for param in params})
    return probe


def step_of(probe: Any) -> Callable[[Any], Any]:
    """The step of the optimizer's class, without the hooks of all optimizers that torch wraps around it."""
    step = type(probe).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - another's object may raise anything; it is not what a step changes
        return value


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside the context are not missing outside."""
    numpy = sys.modules.get("numpy")
    drawn, of_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class _Trial:
    """Steps of copies of an optimizer with the settings of one group."""

    def __init__(self, optimizer: Any, number: int, device: torch.device) -> None:
        self._optimizer, self._number, self._device = optimizer, number, device
        draw = torch.Generator("cpu").manual_seed(0)
        self._values, self._grads = list[torch.Tensor](), list[list[torch.Tensor]]()
        for scale in (0.1, 3.0):
            value, common, *noise = torch.randn((_STEPS + 2, *_SHAPE), generator=draw, device="cpu").unbind()
            common -= value * (common * value).sum(1, keepdim=True) / value.square().sum(1, keepdim=True)
            grads = [(common + 0.1 * min(step, 1) * one) * scale for step, one in enumerate(noise)]
            grads[_LULL] *= _LOW
            self._values.append(value.to(device))
            self._grads.append([grad.to(device) for grad in grads])
        self._whole, self._again = self._try(0), self._try(0, seed=1)

    def moves_nothing(self) -> bool:
        """Did the step of a tensor with gradients leave its values alone?"""
        return self._whole is not None and not self._whole[0][0].any()

    def goes_by_whole_tensors(self) -> bool:
        """Are slices stepped in another way than the whole? True where the optimizer cannot be asked."""
        slices = [self._try(0, part=part) for part in (slice(0, _EDGE), slice(_EDGE, None))]
        if self._whole is None or any(found is None for found in slices):
            return True
        (whole,), states = self._whole
        if self._draws() or any(not _of_elements(value) for state in states for value in state.values()):
            return True
        return not _same(torch.cat([found[0][0] for found in slices if found is not None]), whole)

    def depends_on_others(self) -> bool:
        """Is a tensor stepped in another way beside another one? False for steps that draw random numbers."""
        both, other = self._try(0, 1), self._try(1)
        if self._whole is None or both is None or other is None or self._draws():
            return False
        alone = [self._whole[0][0], other[0][0]]
        return not all(_same(a, b) for a, b in zip(alone, both[0]))

    def _draws(self) -> bool:
        """Does the step depend on random numbers, which may be one for the whole tensor?"""
        return self._whole is None or self._again is None or not _same(self._again[0][0], self._whole[0][0])

    def _try(
        self, *numbers: int, seed: int = 0, part: slice | None = None
    ) -> tuple[list[torch.Tensor], list[Mapping[str, Any]]] | None:
        """Changes of the samples with these numbers (of a part of their elements), and their states; None where the
        step fails, such as one that wants a closure.
        """
        cut = [self._values[n] if part is None else self._values[n].reshape(-1)[part] for n in numbers]
        params = [torch.nn.Parameter(value.clone()) for value in cut]
        with _own_random_numbers(self._device), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            try:
                probe = probe_of(self._optimizer, self._number, params)
                _set_rate(probe.param_groups[self._number])
                for step in range(_STEPS):
                    for param, number in zip(params, numbers):
                        grad = self._grads[number][step]
                        param.grad = grad.clone() if part is None else grad.reshape(-1)[part].clone()
                    step_of(probe)(probe)
            except Exception:  # noqa: BLE001 - another's code may raise anything: it cannot be asked
                return None
        return [(p.detach() - value).reshape(-1) for p, value in zip(params, cut)], [probe.state[p] for p in params]


def _set_rate(group: dict[str, Any]) -> None:
    lr = group.get("lr")
    if isinstance(lr, (torch.Tensor, int, float)):
        rate = max(float(lr), float(group.get("initial_lr") or 0), _RATE)
        group["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate


def _same(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Up to rounding, which may differ with the place in a tensor."""
    most = float(others.abs().max())
    return torch.allclose(some, others, rtol=1e-4, atol=1e-5 * most, equal_nan=True)


def _of_elements(state: Any) -> bool:
    """Can a state be cut with the elements: one value for each, or one for all?"""
    if isinstance(state, torch.Tensor):
        return state.numel() == 1 or tuple(state.shape) == _SHAPE
    return state is None or isinstance(state, (int, float, str))
