"""The base of the compressed optimizers: clock, gradients, the flat buffer, masks, and saving.

They work in two surroundings. In a plain loop the optimizer communicates by itself: gradients stay local
(`loss.backward()` on every rank, no DDP) and `step()` averages what has to be averaged. Inside an engine that reduces
gradients during backward, the engine calls `expect_averaged_gradients()` once and asks `takes_local_gradients` before
each reduction: True means that it must leave the gradients of this step alone.

All ranks must do the same steps with the same parameters; in a plain loop the first step compares the parameters. A
parameter without a gradient counts as having zeros; one that was frozen (`requires_grad_(False)`) stays as it is.
States are float32 whatever the parameters' dtype; 16-bit parameters are updated in their own dtype (fp32 master weights
are an engine's business).

Elements whose variance is exactly zero have never had a gradient. Their share of a message is noise of the size of the
scale, which Adam would divide by eps; they are left alone until an exact step moves their variance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..compressed.signs import Measure, check_measure
from ..errors import CommArgumentError, CommError
from ..groups import get_world_size, is_initialized
from .amp import found_overflow, unscale
from .arena import Arena, errors_of, take_errors
from .arithmetic import Hyper, descend, roots, with_variance_floor
from .average import average_exactly, exact_bytes
from .checks import (
    Compression,
    check_backend,
    check_compression,
    check_floor,
    check_group,
    check_start,
    find_masks,
    say_unused_backend,
)
from .engine_switch import EngineSwitch
from .schedule import StepKind
from .volume import StepTraffic

_log = logging.getLogger(__name__)


class CompressedOptimizer(torch.optim.Optimizer):
    """The base class of the compressed optimizers. Subclasses define a step; this class holds the data it works on."""

    clock_type: type
    one_scale = False
    may_skip_freezing = False
    # torch.amp.GradScaler then calls `step` after an overflow too: it sees one rank's gradients, and all ranks must
    # skip together.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        process_group: Any,
        compression: Compression,
        gradient_dtype: torch.dtype | None,
        scale: Any,
        variance_floor: float,
        comm_backend_name: str | None,
        cuda_aware: bool,
        deepspeed: Any,
    ) -> None:
        self._process_group = process_group
        self._scale: Measure = check_measure(scale)
        self._floor = check_floor(variance_floor)
        self._floors = False  # whether the running step needs it
        self._compresses = check_compression(compression) == "on"
        self._gradient_dtype = gradient_dtype
        self._averaged_elsewhere = False
        self._arenas: list[Arena] = []
        self._members: tuple[int, ...] | None = None
        self._arena_of: dict[int, Arena] = {}
        self._masks: dict[int, torch.Tensor] | None = None
        self._still: frozenset[int] = frozenset()
        self.clock: Any = self.clock_type()
        self.last_traffic: StepTraffic | None = None
        check_backend(comm_backend_name, cuda_aware)
        self._backend_name = comm_backend_name
        self._engine = None if deepspeed is None else EngineSwitch(deepspeed)
        super().__init__(params, defaults)
        if self._engine is not None:
            self.expect_averaged_gradients()
            self._tell_engine()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's; the new parameters must come while the variance still moves."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group, len(self.param_groups) - 1, self.may_skip_freezing)
        group["betas"] = tuple(group["betas"])

    # - what an engine asks

    @property
    def takes_local_gradients(self) -> bool:
        """Whether the coming step wants each rank's own gradients, not their mean."""
        return self._compresses and self._world_size() > 1 and self._coming() is not StepKind.EXACT

    def expect_averaged_gradients(self, wire_dtype: torch.dtype | None = None) -> None:
        """From now on other code averages the gradients of exact steps, sending them in `wire_dtype`."""
        self._averaged_elsewhere = True
        self._gradient_dtype = wire_dtype or self._gradient_dtype

    def synchronize(self) -> None:
        """Make parameters and states equal on all ranks, where they differ between two steps (0/1 Adam). Collective."""

    def _tell_engine(self) -> None:
        """Before the next backward: an engine given as `deepspeed` must know whether to reduce its gradients."""
        if self._engine is not None:
            self._engine.reduce_gradients(not self.takes_local_gradients)

    def _coming(self) -> StepKind:
        """The kind of the next step, if compression is on."""
        raise NotImplementedError

    # - the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters (collective: every rank of the group). Returns what `closure` returned.

        Under torch.amp.GradScaler an overflow on one rank skips the step on all.

        Raises:
            CommError: in the first step of a plain loop, on all ranks: the ranks have different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = list(self.parameters())
        if found_overflow(self, parameters, self._process_group, self._world_size()):
            return loss
        unscale(self, parameters)
        self._prepare()
        self._still = self._find_still()
        kind = self._advance()
        self._floors = bool(self._floor) and kind is not StepKind.EXACT
        self._apply(kind)
        self._save_clock()
        self._account(kind)
        self._tell_engine()
        return loss

    def _advance(self) -> StepKind:
        """Count the step that begins now."""
        raise NotImplementedError

    def _apply(self, kind: StepKind) -> None:
        """Do it."""
        raise NotImplementedError

    def _world_size(self) -> int:
        return get_world_size(self._process_group) if is_initialized() else 1

    # - parameters and their states

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters, group by group."""
        return (p for group in self.param_groups for p in group["params"])

    def _device_type(self) -> str:
        return next((p.device.type for p in self.parameters()), "cpu")

    def _compressed(self) -> list[torch.Tensor]:
        """Those whose communication is compressed."""
        return [p for group in self.param_groups if not group.get("non_freeze") for p in group["params"]]

    def _prepare(self) -> None:
        """Make buffers and states for the parameters there are now; find the clock in states that came from a file."""
        if self._backend_name is not None:
            say_unused_backend(self._backend_name, self._process_group, self._device_type())
            self._backend_name = None
        self._lay_out()
        fresh = [p for p in self.parameters() if "exp_avg_sq" not in self.state[p]]
        self._read_clock()
        if fresh and self.clock.variance_steps and not self._moves_variance():
            raise CommError(
                f"{type(self).__name__}: {len(fresh)} of {len(list(self.parameters()))} parameters (the first of shape "
                f"{tuple(fresh[0].shape)}) have no state, but the variance is frozen since step "
                f"{self.clock.variance_steps}; add parameters before, load a checkpoint that has them, or start again"
            )
        if fresh and self._world_size() > 1 and not self._averaged_elsewhere:
            check_start(fresh, self._process_group)
        for parameter in fresh:
            self.state[parameter].update(self.state_template(parameter))
        for parameter in self._compressed():
            self._bind(parameter)

    def _moves_variance(self) -> bool:
        return not self._compresses or self._coming() is StepKind.EXACT

    def _lay_out(self) -> None:
        members = tuple(id(p) for p in self._compressed())
        if members == self._members:
            return
        if self._members is not None and any(arena.feedback is not None for arena in self._arenas):
            _log.warning("the parameters have changed: what compression had kept back is dropped")
        self._members, self._masks = members, None
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in self._compressed():
            by_device.setdefault(parameter.device, []).append(parameter)
        group, size = self._process_group, self._world_size()
        self._arenas = [
            Arena(ps, group=group, world_size=size, one_scale=self.one_scale, scale=self._scale)
            for ps in by_device.values()
        ]
        self._arena_of = {key: arena for arena in self._arenas for key in arena.views}

    def state_template(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states a parameter has before its first step, and the form of those in a file."""
        zeros = {key: torch.zeros_like(parameter, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        return {**asdict(self.clock_type()), **zeros}

    def _bind(self, parameter: torch.Tensor) -> None:
        """Let the state that is compressed be the parameter's part of the flat buffer."""
        state = self.state[parameter]
        state["exp_avg"] = self._arena_of[id(parameter)].adopt(parameter, state["exp_avg"])

    def _read_clock(self) -> None:
        steps = [(int(self.state[p].get("step", 0)), i, p) for i, p in enumerate(self.parameters()) if self.state[p]]
        if not steps:
            return
        state = self.state[max(steps)[2]]
        step = int(state.get("step", 0))
        for name, value in asdict(self.clock_type()).items():
            setattr(self.clock, name, type(value)(state.get(name, self._missing_clock(name, step))))

    def _missing_clock(self, name: str, step: int) -> Any:
        """A counter that the file does not have, because another optimizer wrote it: all its steps moved the
        variance.
        """
        return step if name == "variance_steps" else getattr(self.clock_type(), name)

    def _save_clock(self) -> None:
        values = asdict(self.clock)
        for parameter in self.parameters():
            self.state[parameter].update(values)

    def _states(self, parameters: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
        return [self.state[p][key] for p in parameters]

    def _roots(self, parameters: Sequence[torch.Tensor], h: Hyper) -> list[torch.Tensor]:
        """The divisors of the momenta; in steps that are not exact with the variance raised to its floor."""
        v = self._states(parameters, "exp_avg_sq")
        return roots(with_variance_floor(v, self._floor) if self._floors else v, h)

    # - gradients

    def _gradients(self, parameters: Sequence[torch.Tensor], *, averaged: bool) -> dict[int, torch.Tensor]:
        """float32 gradients by parameter; `averaged` over the ranks unless other code has done it."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for gradient in gradients:
            if gradient.is_sparse:
                raise CommArgumentError(
                    f"{type(self).__name__}: a parameter of shape {tuple(gradient.shape)} has a sparse gradient; build"
                    " its module with sparse=False"
                )
        if averaged and self._world_size() > 1:
            average_exactly(gradients, self._process_group, self._gradient_dtype)
        return {id(p): g.to(torch.float32) for p, g in zip(parameters, gradients)}

    def _find_still(self) -> frozenset[int]:
        """Parameters frozen by the user: their places in messages stay, their values do not move."""
        without = (p for p in self.parameters() if p.grad is None)
        return frozenset(id(p) for p in without if self._averaged_elsewhere or not p.requires_grad)

    def _descend_by(
        self,
        parameters: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        lr: float,
    ) -> None:
        """targets = targets - lr steps, where the parameters they belong to are not frozen."""
        moving = [i for i, p in enumerate(parameters) if id(p) not in self._still]
        if moving:
            descend([targets[i] for i in moving], [steps[i] for i in moving], lr)

    def _exact_everywhere(self, kind: StepKind) -> bool:
        """Whether this step's gradients are to be averaged here in full precision."""
        return kind is StepKind.EXACT and not self._averaged_elsewhere

    # - masks

    def _mask(self, parameters: Iterable[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Zero, in what has arrived, the elements that are masked by the caller or that never had a gradient."""
        if self._masks is None:
            self._masks = find_masks(self.param_groups, self.state)
        for parameter, value in zip(parameters, values):
            mask = self._masks.get(id(parameter))
            if mask is not None:
                value.mul_(mask)

    # - accounting

    def _account(self, kind: StepKind) -> None:
        size = self._world_size()
        uncompressed = exact_bytes(list(self.parameters()), size, self._gradient_dtype)
        plain = [p for group in self.param_groups if group.get("non_freeze") for p in group["params"]]
        compressed = sum(arena.sent_bytes() for arena in self._arenas)
        sent = {StepKind.EXACT: uncompressed, StepKind.LOCAL: 0}.get(
            kind, compressed + exact_bytes(plain, size, self._gradient_dtype)
        )
        self.last_traffic = StepTraffic(self.clock.step, kind, sent, uncompressed)

    def error_bytes(self) -> int:
        """Bytes this rank holds for error feedback: 4 per compressed parameter and 4 / P more, P ranks."""
        return sum(arena.nbytes() for arena in self._arenas)

    def communication_tensors(self) -> list[torch.Tensor]:
        """Everything held beside the states of parameters: flat buffers and errors."""
        return [t for arena in self._arenas for t in arena.tensors()]

    # - saving: errors differ between ranks, so that they have names and ranges of their own

    def state_ranges(self, parameter: torch.Tensor) -> list[tuple[str, int, torch.Tensor]]:
        """(key, first element, 1-D values) of what this rank alone holds of a parameter; over all ranks each key is
        whole.
        """
        arena = self._arena_of.get(id(parameter))
        return [] if arena is None else list(arena.ranges(parameter))

    def read_state_ranges(
        self, parameter: torch.Tensor, keys: Sequence[str], read: Callable[[str, int, int], torch.Tensor | None]
    ) -> Callable[[], None]:
        """Read what `state_ranges` gave on any number of ranks; the function returned puts it in place (see
        `Arena.read`).

        Nothing that a step uses is changed before that function is called. Without keys errors start at zero.
        """
        self._lay_out()
        arena = self._arena_of.get(id(parameter))
        install = None if arena is None else arena.read(parameter, keys, read)

        def put() -> None:
            self._masks = None
            if install is not None:
                install()

        return put

    def load_state_ranges(
        self, parameter: torch.Tensor, keys: Sequence[str], read: Callable[[str, int, int], torch.Tensor | None]
    ) -> None:
        """Take what `state_ranges` gave on any number of ranks, at once; see `read_state_ranges`."""
        self.read_state_ranges(parameter, keys, read)()

    def states_loaded(self) -> None:
        """States were put into `state` from outside: take the clock from them."""
        self.clock, self._masks = self.clock_type(), None
        for state in self.state.values():
            state.pop("exp_avg_mask", None)  # in states of an earlier version
        self._read_clock()
        self._tell_engine()

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict plus this rank's errors under "error_feedback": ranks have different ones."""
        saved = super().state_dict()
        saved["error_feedback"] = errors_of(self._arenas)
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank. Errors of another number of ranks are dropped, with a warning.

        The masks are those of this script's parameter groups. Saved masks are dropped: a script that goes on without
        one, such as with longer sequences, moves all elements again.
        """
        saved = dict(state_dict)
        errors = saved.pop("error_feedback", [])
        masks = [group.get("exp_avg_mask") for group in self.param_groups]
        super().load_state_dict(saved)
        for group, mask in zip(self.param_groups, masks):
            group.pop("exp_avg_mask", None)
            if mask is not None:
                group["exp_avg_mask"] = mask
        self._undo_casts(saved)
        self.states_loaded()
        self._lay_out()
        take_errors(self._arenas, errors)

    def _undo_casts(self, saved: dict[str, Any]) -> None:
        """torch casts states to the parameter's dtype; ours are float32."""
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, self.parameters()):
            for key, value in saved["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and parameter.dtype != torch.float32:
                    self.state[parameter][key] = value.to(parameter.device, torch.float32, copy=True)
