"""The base of the optimizers: torch.optim.Optimizer in front, batches of slots behind.

`step` collects every parameter with a gradient into batches of the same dtypes, device and step number, checks all of
them, and only then writes: an error leaves parameters and states as they were. A batch is one kernel call however many
tensors it has.

State: tensors under torch's names, and `step` as a Python number. State dicts go both ways between these optimizers and
torch's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import update
from ..errors import HyperparameterError, TensorError
from ..layouts import is_dense, put_back
from ..low_bit import RULES
from ..spec import Algorithm, Batch, Guard, Hyper, Slot, check_slot
from .slots import local_slot, working_slot

CopyOut = Mapping[Tensor, Tensor]
Offsets = Mapping[Tensor, int]


class SkipCounter:
    """Counts steps of one set of parameters that their device decided to skip, without the host knowing.

    After an overflow nothing may change, and the step must not count, or the bias corrections would run ahead. The host
    counts every step; the device counts those it skipped. `settle` subtracts them; it waits for the device, and is
    called where numbers leave the optimizer.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._skipped: Tensor | None = None

    def fits(self, states: list[dict[str, Any]]) -> bool:
        """Whether what was counted so far holds for just these states."""
        return self._skipped is None or [id(s) for s in self._states] == [id(s) for s in states]

    def arm(self, batches: list[Batch], states: list[dict[str, Any]], found_inf: Tensor) -> None:
        """Make the batches depend on `found_inf`, one number on their device (not 0 = skip)."""
        self._states = states
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=found_inf.device)
        flag = found_inf.detach().reshape(()).to(torch.float32)
        for batch in batches:
            batch.guard = Guard(flag, self._skipped)

    def count(self, found_inf: Tensor) -> None:
        """To be called when the batches are under way."""
        if self._skipped is not None:
            self._skipped = self._skipped + (found_inf.detach().reshape(()) != 0)

    def settle(self) -> None:
        """Take the skipped steps off the counters of the states. Waits for the device."""
        if self._skipped is None:
            return
        skipped = int(self._skipped)
        for state in self._states:
            state["step"] -= skipped
        self._states, self._skipped = [], None


def check_numbers(defaults: Mapping[str, Any]) -> None:
    """Raise `HyperparameterError` for a number out of its range."""
    for key in ("lr", "eps", "weight_decay", "momentum", "max_grad_norm", "min_coeff"):
        if key in defaults and not float(defaults[key]) >= 0.0:
            raise HyperparameterError(f"{key}: got {defaults[key]}, expected a number >= 0")
    for i, beta in enumerate(defaults.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise HyperparameterError(f"betas[{i}]: got {beta}, expected 0 <= beta < 1")
    if defaults.get("amsgrad"):
        raise HyperparameterError("amsgrad: not available in the fused optimizers; use torch.optim.AdamW(amsgrad=True)")


class FusedOptimizer(Optimizer):
    """Base of the optimizers here. Subclasses name their rule and their states, and give the numbers of a group."""

    algorithm: Algorithm
    state_names: tuple[str, ...] = ()
    # States whose dtype is not the state dtype.
    special_dtypes: Mapping[str, torch.dtype] = {"low_bits": torch.int16}
    # What the constructor was told beside the groups' numbers: kept by pickle and deepcopy.
    own_options: tuple[str, ...] = ()
    # Whether a shard can be updated without knowing of the others.
    elementwise = True
    # Whether the rule depends on the index of an element, so that its states lie in row-major order whatever the
    # parameter's strides.
    row_major = False
    # Whether `step_flat` takes gradients in 16 bits for parameters in 32: the kernels widen them, which is exact.
    takes_16_bit_gradients = True
    # torch.amp.GradScaler looks for this, and sets `grad_scale` and `found_inf` on the instance around `step`; it must
    # find no such names before.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_numbers(defaults)
        self._skips = SkipCounter()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; checks the group's numbers first."""
        check_numbers({k: v for k, v in param_group.items() if k != "params"})
        add = Optimizer.add_param_group
        if "torch._dynamo" not in sys.modules:  # torch's own wrapper imports it (2 s) to say: do not compile this
            add = getattr(add, "__wrapped__", add)
        add(self, param_group)

    # ---- for subclasses -------------------------------------------------------------------------------------------

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float | Tensor) -> Hyper:
        raise NotImplementedError

    def _state_dtype(self, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        return group.get("state_dtype") or param.dtype

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = self._state_dtype(param, group)
        state: dict[str, Any] = {"step": 0}
        for name in self.state_names:
            state[name] = self._zeros(param, dtype)
        return state

    def _zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """A new state, in the order in which it will be walked through."""
        return torch.zeros_like(param, dtype=dtype, memory_format=self._memory_format(param))

    def _memory_format(self, param: Tensor) -> torch.memory_format:
        keep = is_dense(param) and not self.row_major
        return torch.preserve_format if keep else torch.contiguous_format

    def _slot(self, param: Tensor, grad: Tensor, state: dict[str, Any], name: str) -> Slot:
        return Slot(
            param,
            grad,
            tuple(state[n] for n in self.state_names if n in state),
            low_bits=state.get("low_bits"),
            name=name,
        )

    # ---- stepping ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float | Tensor | None = None,
        found_inf: Tensor | None = None,
        copy_out: CopyOut | None = None,
        offsets: Offsets | None = None,
    ) -> Any:
        """One update of every parameter that has a gradient.

        `grad_scale`: gradients are divided by it inside the pass (multiplied by its fp32 reciprocal); they stay as they
        are. It carries unscaling and clipping at once: loss scale divided by the clip coefficient. `copy_out`: for
        parameters in it, the new values are also written to that tensor, in its dtype, in the same pass. `found_inf` (a
        tensor of one number): when it is not 0, nothing changes and the step does not count; on a device with kernels
        of ours the host does not wait for it. torch.amp.GradScaler gives both by itself. `offsets`: for parameters that
        are parts of larger ones, the index of their first element there; it keys stochastic rounding. Returns the
        closure's loss. Raises `TensorError` before anything is written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = next((s for s in (grad_scale, getattr(self, "grad_scale", None)) if s is not None), 1.0)
        _check_scale(scale)
        found = getattr(self, "found_inf", None) if found_inf is None else found_inf
        if found is not None and not self._decided_on_device(found):
            if bool(found != 0):
                return loss
            found = None
        batches, states = self._collect(scale, copy_out or {}, offsets or {})
        if not (self._skips.fits(states) and (found is not None or self._skips.fits([]))):
            self._skips.settle()
            batches, states = self._collect(scale, copy_out or {}, offsets or {})
        if found is not None:
            self._skips.arm(batches, states, found)
        self._apply(batches)
        for state in states:
            state["step"] += 1
        if found is not None:
            self._skips.count(found)
        return loss

    def _decided_on_device(self, found_inf: Tensor) -> bool:
        if self.algorithm in RULES:  # torch operations, which know of no guard
            return False
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        return update.decides_on_device(found_inf, grads)

    def _collect(
        self, scale: float | Tensor, copy_out: CopyOut, offsets: Offsets
    ) -> tuple[list[Batch], list[dict[str, Any]]]:
        found: dict[tuple, Batch] = {}
        touched: list[dict[str, Any]] = []
        fresh: list[Tensor] = []
        try:
            for number, group in enumerate(self.param_groups):
                for i, param in enumerate(group["params"]):
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    if not state:
                        fresh.append(param)
                        state.update(self._new_state(param, group))
                    slot = self._slot(param, param.grad, state, f"parameter {i} of group {number}")
                    slot.copy, slot.offset = copy_out.get(param), offsets.get(param, 0)
                    slot = self._checked(local_slot(slot, self.elementwise), group)
                    key = (number, state["step"], slot.kind())
                    if key not in found:
                        hyper = self._hyper(group, state["step"] + 1, scale)
                        found[key] = Batch(self.algorithm, hyper, group=number)
                    found[key].slots.append(slot)
                    touched.append(state)
        except (TensorError, HyperparameterError):
            for param in fresh:
                del self.state[param]
            raise
        return list(found.values()), touched

    def _checked(self, slot: Slot, group: dict[str, Any]) -> Slot:
        """The slot as kernels take it. Raises `TensorError` and `HyperparameterError`."""
        check_slot(slot, self.algorithm)
        return working_slot(slot, row_major=self.row_major)

    def _apply(self, batches: Sequence[Batch]) -> None:
        self._update(batches)
        copies = [copy for batch in batches for slot in batch.slots for copy in slot.copies]
        if copies:
            put_back(copies)

    def _update(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            update.apply(batch)

    # ---- flat shards -------------------------------------------------------------------------------------------------

    def new_flat_state(self, param: Tensor, *, group: int = 0) -> dict[str, Any]:
        """Zero states for a flat buffer, to be kept by the caller and given to `step_flat`."""
        return self._new_state(param, self.param_groups[group])

    @torch.no_grad()
    def step_flat(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        *,
        group: int = 0,
        grad_scale: float | Tensor = 1.0,
        copy_out: Tensor | None = None,
        offset: int = 0,
    ) -> None:
        """One update of a flat buffer that need not be a registered parameter, with the numbers of a group.

        `param`, `grad`: contiguous, equal numel; `state`: from `new_flat_state`, or slices of one with the same `step`;
        its `step` is counted up. `offset`: index of the first element in the whole buffer. Cutting a buffer into pieces
        does not change the result (coded states: pieces of multiples of their block). Raises `TensorError` before
        anything is written.
        """
        _check_scale(grad_scale)
        slot = self._slot(param, grad, state, "flat buffer")
        slot.copy, slot.offset = copy_out, offset
        slot = self._checked(slot, self.param_groups[group])
        hyper = self._hyper(self.param_groups[group], state["step"] + 1, grad_scale)
        self._apply([Batch(self.algorithm, hyper, [slot])])
        state["step"] += 1

    # ---- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Waits for the device when steps were made with a `found_inf` there."""
        self._skips.settle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._skips.settle()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.own_options}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._skips = SkipCounter()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        group_of = {p: g for g in self.param_groups for p in g["params"]}
        for param, kept in self.state.items():
            if isinstance(kept.get("step"), Tensor):
                kept["step"] = int(kept["step"].item())
            elif kept and "step" not in kept:
                kept["step"] = self._unsaid_step(kept, group_of[param])

    def _unsaid_step(self, state: dict[str, Any], group: dict[str, Any]) -> int:
        """The number of steps of another optimizer's state that does not state it itself. Raises `TensorError`."""
        if "step" not in group:
            raise TensorError(
                f"the state dict has {', '.join(state)} but no step, neither with the states nor in their group; set"
                " `step` to the number of steps behind them"
            )
        return int(group["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, from a state dict of this optimizer or of torch's equivalent.

        torch would cast every state to the parameter's dtype; here states keep their own (fp32 moments of bf16
        parameters stay exact). Raises `HyperparameterError` for a group whose numbers are out of range or mean another
        rule (amsgrad); nothing is loaded then.
        """
        for saved in state_dict["param_groups"]:
            check_numbers(saved)
        super().load_state_dict(state_dict)
        ours = [p for g in self.param_groups for p in g["params"]]
        theirs = [i for g in state_dict["param_groups"] for i in g["params"]]
        group_of = {p: g for g in self.param_groups for p in g["params"]}
        for key, saved in state_dict["state"].items():
            if key not in theirs:  # kept under a key of its own (CPUAdam's subgroups): torch passes the very tensors on
                self.state[key] = copy.deepcopy(saved)
        for param, index in zip(ours, theirs):
            saved = state_dict["state"].get(index)
            if not saved:
                continue
            for key, value in saved.items():
                if isinstance(value, Tensor) and key != "step":
                    dtype = self._loaded_dtype(key, value, param, group_of[param])
                    self.state[param][key] = self._own_copy(value, param, dtype)

    def _own_copy(self, value: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
        """A loaded state as `_new_state` would lay it out."""
        kept = value.detach().to(param.device, dtype).clone().contiguous()
        if value.shape != param.shape or param.is_contiguous():
            return kept
        return torch.empty_like(param, dtype=dtype, memory_format=self._memory_format(param)).copy_(kept)

    def _loaded_dtype(self, key: str, value: Tensor, param: Tensor, group: dict[str, Any]) -> torch.dtype:
        if key in self.special_dtypes:
            return self.special_dtypes[key]
        return self._state_dtype(param, group) if value.is_floating_point() else value.dtype


def _check_scale(scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise TensorError(f"grad_scale: got a tensor of {scale.numel()} elements, expected one number")
    elif not scale > 0:
        raise HyperparameterError(f"grad_scale: got {scale}, expected a number > 0")
