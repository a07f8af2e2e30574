"""`ZeroOptimizer` steps this rank's slices with the user's optimizer.

It is what users call, and a `torch.optim.Optimizer`, so that schedulers accept it: its `param_groups` are the inner
optimizer's own and contain the model's parameters; during the step the masters are in their place. The work is done by
what it holds: `update` makes the step, `held` reads and writes this rank's values, `layout` knows where they lie,
`control` is for an engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from .assembling import StepParts
from .control import Control
from .copies import ModelCopy
from .errors import ZeroOptimizerError
from .held import HeldState
from .homes.stored import TensorStore
from .owners import Owners
from .params.flat import FlatGroup
from .params.partitioned_unit import is_partitioned
from .replanning import Replanner, add_group
from .state.layout import ModelLayout
from .state.loading import SliceLoad
from .state.moving import OffloadStateTypeEnum
from .state.slices import ParamSlice, Reader
from .step.inner import StateView, checked_state
from .step.masters import refresh_master, write_parameters
from .step.nonfinite import NonFiniteWarning
from .step.plan import StepPlan
from .step.runner import StepFailure
from .update import StepOutcome, Update

__all__ = ["ZeroOptimizer"]

_RELEASED = (
    "this optimizer was released: release() was called (or destroy() of its engine), or its model was"
    " sharded again; use the optimizer that dsx_zero.shard returned last"
)
_HALF_LAID_OUT = (
    "an error happened while the model was given a new layout, and its states are not complete; start again"
    " from the last checkpoint"
)


class TorchState(Protocol):
    """Gives states to torch's functions that ask for them (`get_model_state_dict`, `dcp.save`, ...), in the form that
    they ask for: "whole" tensors or "parts".
    """

    def attach(self, optimizer: ZeroOptimizer) -> None: ...

    def asked_for(self) -> str | None: ...

    def of_optimizer(self, optimizer: ZeroOptimizer, form: str) -> dict[str, Any]: ...

    def names(self, optimizer: ZeroOptimizer) -> Mapping[Any, Any]: ...

    def load(self, optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None: ...


def _before_load(optimizer: Callable[[], ZeroOptimizer | None], group: FlatGroup) -> None:
    """A checkpoint is about to be read into this rank's shard of a group of stage 3; every rank says so. The next step
    takes the values over into the masters.
    """
    owner = optimizer()
    if owner is not None and not owner.released:
        owner.update.abandon()
        owner.free_gathered()
        owner.update.edits.note_shard(group)
        group.note_replaced()


def _refused(what: str) -> Callable[..., Any]:
    """A method that refuses a hook on state dicts."""

    def register(self: ZeroOptimizer, hook: Any, prepend: bool = False) -> Any:
        """Refused, see the error."""
        raise ZeroOptimizerError(
            f"{what}: state dicts of a ZeroOptimizer are this rank's slices by name, not what such hooks expect, and"
            " would not call them; change the dict that state_dict() returns, or the one that is given to"
            " load_state_dict()"
        )

    return register


class ZeroOptimizer(torch.optim.Optimizer):
    """The optimizer of a sharded model, which `dsx_zero.shard` returns. It is a `torch.optim.Optimizer`: schedules,
    hooks and parameter groups work on it.

    `step(grad_scale=, max_norm=)` unscales, clips by the norm of all ranks, updates this rank's masters and publishes
    the parameters; `inner` is the optimizer that was given. Every rank calls its methods in the same order.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        parts: StepParts,
        *,
        store: TensorStore | None = None,
        owners: Owners[ZeroOptimizer],
        replanner: Replanner,
        torch_state: TorchState,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are the inner optimizer's, there is no second set of them.
        self.inner = self.optimizer = inner
        """The user's optimizer, which steps the masters."""
        self.store = store
        """The store of state on disk, as it was given to `shard`; None: there is none."""
        self._owners, self._replanner, self._torch_state = owners, replanner, torch_state
        self._latest: StepOutcome | None = None
        self.released = False
        """Whether the model may be sharded again."""
        self._failure, self._nonfinite = StepFailure(), NonFiniteWarning()
        self.held = HeldState()
        """Reads and writes this rank's values."""
        self.control = Control(self.held, self._failure)
        """For the owner of this optimizer, such as an engine."""
        self.qk_clip: Any = None
        """The `dsx_zero.qk_clip.QKClip` that clips the logits of attention behind each step; None: there is none."""
        self.steps_done = 0
        """Steps so far, those that an overflow skipped included. To be set where training goes on from a checkpoint,
        before `step_during_backward`: `offload_optimizer.late_update_after` counts them.
        """
        self._take(parts)
        torch_state.attach(self)

    def _take(self, parts: StepParts) -> None:
        """Step with these parts from now on."""
        self.runtime = parts.runtime
        """The parts this optimizer is made of."""
        self.placements = parts.placements
        """The places of the state of each unit, by class; chosen when the model is sharded and when its layout
        changes.
        """
        self.states = parts.states
        """The inner optimizer's states, wherever they live."""
        self.layout = ModelLayout(parts.runtime, parts.masters, parts.faces)
        """The flat group and this rank's masters of each parameter."""
        self.update = Update(
            self.inner,
            parts,
            self.layout,
            failure=self._failure,
            nonfinite=self._nonfinite,
            moved=lambda parameter: (found := self._owners.find(parameter)) is not None and found[0] is not self,
        )
        """Makes the steps in this layout."""
        self.moved = self.update.moved
        """Moves states off the device and back."""
        self.held.take(parts, self.layout, self.update)
        for parameter, name in self.layout.parameters:
            self._owners.add(parameter, self, name)
        if self.control.watch is not None:
            self.runtime.gradients.follow(self.control.watch)
        me = weakref.ref(self)
        for group in (group for unit in parts.runtime.units for group in unit.groups):
            if is_partitioned(group):
                group.before_load = partial(_before_load, me, group)
        self._replanner.watch(self.runtime.model, self.update.frozen, weakref.WeakMethod(self.replan))

    # The surface of torch.optim.Optimizer -----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, with the model's parameters (masters of an optimizer that communicates by
        itself).
        """
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The inner optimizer's state, which is kept by master; where masters are whole tensors, a parameter finds
        its own. torch's functions for state dicts get the names of the states, by parameter.
        """
        if self._torch_state.asked_for() is not None:
            return self._torch_state.names(self)
        return StateView(self.inner.state, self.layout.master_of, whole=self.runtime.stage == 0)

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = checked_state(value, self.layout.master_of)  # type: ignore[assignment]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def __repr__(self) -> str:
        run = self.runtime
        place = f"rank={run.ranks.rank}, world_size={run.ranks.size}"
        return f"ZeroOptimizer(stage={run.stage}, {place}, inner={self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise ZeroOptimizerError(
            "a ZeroOptimizer cannot be copied or pickled: it holds shards and process groups; use state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train parameters of the model that no group held, and change the layout of the model (collective).

        Between two updates: behind `step`, before the next backward. Afterwards a forward has to run before a backward.

        Args:
            param_group: as of any `torch.optim.Optimizer`; its parameters are the model's, the same on every rank.

        Raises:
            ZeroOptimizerError: a tensor is not a parameter of the model, or the optimizer communicates by itself.
            ZeroStateError: there are gradients that no step has used; or what `step` raises.
            RanksDifferError: the ranks give different groups, or one of them has failed.
            TypeError, ValueError: what the optimizer itself raises. In all these cases nothing has been changed.
        """
        self._lay_out_anew(lambda: add_group(self.inner, param_group, self.layout, self.runtime))

    def replan(self) -> None:
        """Change the layout of the model, with memory for gradients and states of all that trains now (collective).

        The next forward of the model does it automatically for parameters that were unfrozen and that the optimizer
        holds; call this where only parts of the model are called. Values, states and masters stay bitwise identical.
        Parameters that are frozen now keep their states.

        Raises:
            ZeroStateError, RanksDifferError: see `add_param_group`.
        """
        self._lay_out_anew(lambda: None)

    @torch.no_grad()
    def _lay_out_anew(self, change: Callable[[], None]) -> None:
        """Change the optimizer's groups and lay the model out for what trains then."""
        self.update.finish_late()
        prepared = self._replanner.prepare(self.held, change)
        self.update.abandon()
        self.update.refusal = _HALF_LAID_OUT
        self._take(prepared.carry_out())

    def register_step_pre_hook(self, hook: Any) -> Any:
        """A hook of the inner optimizer's step."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """A hook of the inner optimizer's step."""
        return self.inner.register_step_post_hook(hook)

    register_state_dict_pre_hook = _refused("register_state_dict_pre_hook")
    register_state_dict_post_hook = _refused("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _refused("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _refused("register_load_state_dict_post_hook")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. `set_to_none=False` is accepted and means the same: gradients are buffers of this
        object.
        """
        self.runtime.gradients.clear()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; legal in all stages."""
        self.update.check_in_use()
        return self.runtime.gradients.no_sync()

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, so that something else can use the device; `reload_states` brings them back.

        To be called on every rank, between steps. Until they are back, `step`, loads, whole states and accessors
        raise; so do forwards, except those without gradients while the parameters are there. What reads only this
        rank's part works: `state_dict`, an engine's checkpoints, `dsx_zero.export`. A second call adds to the first.

        Args:
            include: classes of state, by `OffloadStateTypeEnum` or its values; None: all.
            device: "cpu".
            pin_memory: page-locked host memory, where the states are on a CUDA device.
            non_blocking: the host does not wait for the copies.

        Raises:
            ZeroConfigError: another class, or another device.
        """
        if self.released:
            self.update.check_usable()
        self.update.check_ended()
        if not self.moved.stashes:
            self.update.edits.take_over()  # while states are away, masters cannot follow what was written before
        self.moved.move_out(include, device, pin=pin_memory, non_blocking=non_blocking)

    def reload_states(
        self, non_blocking: bool = False, include: Iterable[OffloadStateTypeEnum | str] | None = None
    ) -> None:
        """Bring what `offload_states` moved back to where it was; nothing if there is nothing. Every rank calls it.

        Args:
            non_blocking: the host does not wait for the copies.
            include: classes of state, as for `offload_states`; None: all. With `["lp_params"]` forwards without
                gradients work again while the rest stays in host memory.

        Raises:
            ZeroConfigError: another class.
        """
        self.moved.bring_back(include, non_blocking=non_blocking)

    def release(self) -> None:
        """Take every hook off the model, which then trains no more through this optimizer, and hand its process groups
        back. At stage 3 its parameters stay partitioned. To be called on every rank, or on none. Calling it again does
        nothing.
        """
        if self.released:
            return
        self.moved.bring_back()
        self.update.abandon()
        self.released = True
        self.update.refusal = _RELEASED
        self.states.blocks.drop()
        self._replanner.stop_watching()
        self.runtime.gradients.remove_hooks()
        if self.held.parts.unused is not None:
            self.held.parts.unused.remove_hooks()
        self.runtime.publisher.remove_hooks()
        self.runtime.groups.give_back()
        for callback in self.control.on_release:
            callback()

    # The step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, grad_scale: float = 1.0, max_norm: float | None = None
    ) -> StepOutcome:
        """Update the parameters from the gradients of the backwards since `zero_grad` (collective).

        Args:
            closure: called once, before anything else, with gradients enabled; does forward and backward.
            grad_scale: the gradients are this many times too large (loss scaling).
            max_norm: clip so that the global norm is at most this; None or 0 does not clip. In steps of an optimizer
                that works on local gradients each rank clips its own by its own norm; a warning says so once.

        Raises:
            ZeroStateError: the optimizer was released; the model holds other parameters than those that were sharded;
                parameters were written differently on the ranks; one was unfrozen and no forward of the model has run
                since; or, with `ignore_unused_parameters: false`, one got no gradient.
            ZeroOptimizerError: tensors were added to the parameter groups or taken away.
        """
        update, loss = self.update, None
        update.check_in_use()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update.check()
        norm, local, late = update.measure(grad_scale, max_norm, self.steps_done)
        self.steps_done += 1
        self._latest = update.apply(norm, grad_scale=grad_scale, max_norm=max_norm, local=local, late=late)
        return self._latest.with_loss(loss)

    def step_during_backward(self, grad_scale: float = 1.0, max_norm: float | None = None) -> bool:
        """Announce that the coming backward is the last one before `step(grad_scale=grad_scale, max_norm=max_norm)`.

        Units whose masters lie in host memory or on disk (`offload_optimizer`) are then stepped on a thread as soon as
        their gradients are reduced, while backward goes on. The result has the bits of a step after backward.

        With `max_norm`, or 16-bit parameters whose overflow is checked, the norm decides on the step and is known only
        behind backward. Then units are stepped as if nothing was clipped, unless the step before was clipped or
        skipped, and old values are kept: `step` undoes the update bit by bit if the norm says otherwise, or if
        settings, gradients or parameters were written. Elsewhere there is nothing to undo: in the first two announced
        steps nothing is stepped early; if settings, gradients or parameters are written between backward and `step` in
        one of them, nothing ever is. Later such a write makes `step` raise.

        To be called before each such backward on every rank, or on none.

        Args:
            grad_scale, max_norm: as for `step`.

        Returns:
            Whether units are stepped during this backward. Never where the optimizer cannot be stepped in parts or has
            hooks, and where `offload_optimizer.step_during_backward` is false. On a CPU, whose cores would have to do
            both, a step that may have to be undone is begun early only if the key is set to true.
        """
        return self.update.announce(grad_scale, max_norm, self.steps_done)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make parameters what all steps so far mean (collective): apply the update that
        `offload_optimizer.late_update_after` has left for the next step, and make parameters the same on all ranks
        where the optimizer lets them differ between steps (0/1 Adam).
        """
        run = self.runtime
        self.update.finish_late()
        if run.averaging is None:
            return
        self.moved.check()
        run.averaging.synchronize()
        for unit in run.trainable_units():
            for group in unit.trainable:
                write_parameters(group)
        self.update.note_written()

    # What scripts ask after a step -----------------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped because a gradient was not finite."""
        return self._latest is not None and self._latest.overflow

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the latest step's unscaled gradients over all ranks, before clipping; None before the first
        step.
        """
        return None if self._latest is None else self._latest.grad_norm

    @property
    def loss_scale(self) -> float:
        """Factor on the loss of the next backward, from its owner's scaler; 1.0 without one."""
        return self.control.loss_scale()

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows; False without a loss scale."""
        return self.control.dynamic

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce over the ranks what backwards have accumulated so far, `no_sync` or not. Collective; `step` does it
        too.
        """
        self.update.check_in_use()
        self.runtime.gradients.complete()

    def free_gathered(self) -> None:
        """Stage 3: free every gathered parameter, read ahead or kept for reuse; outside of forward and backward.

        Every rank must call it. At other stages parameters are always whole, and nothing happens.
        """
        self.update.check_usable()  # states that offload_states() has moved are not needed
        self.runtime.publisher.free_gathered()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Make the masters equal to the parameters, for values that were written in a way the next step does not
        notice (`p.data`).
        """
        self.update.check_ended()
        for unit in self.runtime.trainable_units():
            for group in unit.trainable:
                refresh_master(group)
        self.update.edits.settle()

    # State ------------------------------------------------------------------------------------------------------------

    def slices(self, *, lazily: bool = False, held: bool = False) -> Iterator[ParamSlice]:
        """This rank's own part of every parameter, frozen ones too, in definition order; over all ranks each element
        once. Values that `offload_states` has moved are read in host memory.

        Args:
            lazily: values that are not in memory are given as `StoredValues`, whose `fetch` reads them.
            held: everything that this rank keeps: whole tensors at stage 0, whole frozen ones up to stage 2.
        """
        return self.held.slices(held=held, lazily=lazily)

    def read_slices(self, reader: Reader) -> SliceLoad:
        """Read everything this rank holds from ranges of named tensors and check it; nothing is changed before
        `install()`.

        Not collective, unlike `install()`: ranks can agree that all of them have read well before one of them changes
        its model.

        Raises:
            ZeroStateError: optimizer states are incomplete, or do not fit the optimizer.
        """
        return self.held.read(reader)

    def load_slices(self, reader: Reader) -> None:
        """Fill parameters, masters and optimizer states from ranges of named tensors (collective). See
        `dsx_zero.Reader`.
        """
        self.held.read(reader).install()

    def copy_of(self, what: torch.nn.Module | Iterable[str] | None = None, *, device: Any = None) -> ModelCopy:
        """A second set of values, sharded over the ranks as the model's are: for an EMA, a reference or a teacher
        (collective). See `ModelCopy`.

        Args:
            what: a part of the model, or names of parameters; None: all of it, with its buffers.
            device: where the copy lies ("cpu" for host memory); None: where the masters are.

        Raises:
            ZeroStateError: there is no such part or name.
        """
        return ModelCopy(self.held, what, device)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's slices by parameter name ("slices"), and "param_groups". Where every rank has whole states, also
        "state", as of a plain optimizer. Tensors are not copied.

        Called by torch's functions for state dicts and checkpoints (`get_optimizer_state_dict`, `dcp.save`), it is
        collective and gives what those expect: "state" and "param_groups" as of a plain optimizer, each tensor whole
        (`full_state_dict=True`) or as a `ShardView` of this rank's part.
        """
        form = self._torch_state.asked_for()
        return self.held.local_state() if form is None else self._torch_state.of_optimizer(self, form)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank of a job with the same stage and number of ranks (collective).

        The state dict of a plain optimizer, with whole states that are the same on every rank, is taken at any stage.

        Raises:
            ZeroStateError: the slices are not this rank's. `dsx_zero.load_full_state_dict` has no such limit.
        """
        self.moved.check()
        self.update.abandon()
        plain = isinstance(state_dict, dict) and {"state", "param_groups"} <= set(state_dict)
        if plain and "slices" not in state_dict:
            self._torch_state.load(self, state_dict)
        else:
            self.held.load_local_state(state_dict)

    @property
    def step_plan(self) -> StepPlan:
        """The actions of a step, as data: `print(optimizer.step_plan)`."""
        return self.update.runner.plan

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank, each storage counted once: params, grads, master (with what tells edits),
        optimizer, and idle message buffers.
        """
        return {kind: sum(tiers.values()) for kind, tiers in self.state_bytes_by_tier().items()}

    def state_bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """`state_bytes`, each class divided by where its bytes lie: "device", "host", "disk", or a tier's own name."""
        return self.held.bytes_by_tier()
