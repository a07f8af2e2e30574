"""`ZeroOptimizer` steps this rank's slices with the user's optimizer.

A step finishes the reductions, computes norm and overflow in one pass, steps the inner optimizer on the masters with
unscaling and clipping as one factor (inside its kernel if it accepts one), writes the low-precision copy, and gathers
the parameters that other ranks updated.

It is a `torch.optim.Optimizer`, so that schedulers accept it. Its `param_groups` are the inner optimizer's own and
contain the model's parameters; during the step the masters are in their place.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from dsx_core.modules import CallingHook

from .alike import telling
from .building import StepParts
from .copies import ModelCopy
from .errors import ZeroOptimizerError, ZeroStateError
from .grads.protocol import BackwardWatch
from .homes.home import Home
from .homes.stored import TensorStore
from .params.flat import FlatGroup
from .params.partitioned_unit import is_partitioned
from .plan.layout import LocalSlice
from .replanning import Replanner
from .state.loading import SliceLoad, publish_masters, read_slices
from .state.local import count_bytes, load_local, save_local
from .state.moving import MovedStates, OffloadStateTypeEnum
from .state.slices import ParamSlice, Reader, iter_slices, read_elements
from .step.edits import EditAgreement, Edits
from .step.failures import StepFailure
from .step.host_step import HostSteps
from .step.inner import StateView, checked_state
from .step.masters import Master, refresh_master, write_parameters
from .step.model_check import Frozen, ModelCheck
from .step.nonfinite import NonFiniteWarning
from .step.norm import StepNorm, clip_factor
from .step.plan import StepPlan
from .step.runner import StepRunner
from .step.segments import connect_norms
from .step.trial import check_divisible
from .torch_names import current_graph_task_id

__all__ = ["OnSpan", "StepOutcome", "ZeroOptimizer"]

OnSpan = Callable[[str, str, int], AbstractContextManager[object]]
"""See `ZeroOptimizer.listen`."""


class Owners(Protocol):
    """Which optimizer a parameter object belongs to, for all models of the process."""

    def add(self, parameter: torch.Tensor, optimizer: ZeroOptimizer, name: str) -> None: ...

    def find(self, parameter: torch.Tensor) -> tuple[ZeroOptimizer, str] | None: ...


def _find_unfrozen(optimizer: Callable[[], ZeroOptimizer | None], module: Any, args: Any) -> None:
    owner = optimizer()
    if owner is not None and not owner.released:
        owner.find_unfrozen()


class TorchState(Protocol):
    """Gives states to torch's functions that ask for them (`get_model_state_dict`, `dcp.save`, ...), in the form that
    they ask for: "whole" tensors or "parts".
    """

    def asked_for(self) -> str | None: ...

    def of_model(self, optimizer: ZeroOptimizer, values: dict[str, Any], form: str) -> None: ...

    def of_optimizer(self, optimizer: ZeroOptimizer, form: str) -> dict[str, Any]: ...

    def names(self, optimizer: ZeroOptimizer) -> Mapping[Any, Any]: ...

    def load(self, optimizer: ZeroOptimizer, state_dict: Mapping[str, Any]) -> None: ...


def _give_to_torch(
    optimizer: Callable[[], ZeroOptimizer | None], module: Any, values: Any, prefix: str, metadata: Any
) -> None:
    """A hook of `model.state_dict()` at stage 3: where a function of torch calls it, put what that expects in the place
    of partitioned parameters (collective for whole tensors).
    """
    owner = optimizer()
    if owner is not None and not owner.released:
        form = owner._torch_state.asked_for()
        if form is not None:
            owner._torch_state.of_model(owner, values, form)


def _before_load(optimizer: Callable[[], ZeroOptimizer | None], group: FlatGroup) -> None:
    """A checkpoint is about to be read into this rank's shard of a group of stage 3; every rank says so. The next step
    takes the values over into the masters.
    """
    owner = optimizer()
    if owner is not None and not owner.released:
        owner._abandon_step()
        owner.free_gathered()
        owner._edits.note_shard(group)
        group.note_replaced()


def _call_of_inner(
    optimizer: Callable[[], ZeroOptimizer | None], kind: type, name: str, *arguments: Any, **options: Any
) -> Any:
    """`state_dict` and `load_state_dict` of the optimizer that the user made."""
    owner = optimizer()
    if owner is None:
        raise ZeroStateError(f"{kind.__name__}.{name}(): the model that it trained, sharded, is not there any more")
    with owner.whole_states(f"{kind.__name__}.{name}()"):
        return getattr(kind, name)(owner.inner, *arguments, **options)


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


class StepOutcome:
    """What a step did.

    Attributes:
        overflow: gradients were not finite and nothing was changed.
        loss: what the closure returned, if there was one.
    """

    __slots__ = ("_norm", "loss", "overflow")

    def __init__(self, overflow: bool, norm: torch.Tensor | float | None, loss: Any = None) -> None:
        self.overflow = overflow
        self._norm = norm
        self.loss = loss

    def without_loss(self) -> StepOutcome:
        """The same, holding nothing of the closure."""
        return StepOutcome(self.overflow, self._norm)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm before clipping. Reading it waits for the device, which `step` itself does not do."""
        if isinstance(self._norm, torch.Tensor):
            self._norm = self._norm.item()
        return self._norm

    def __repr__(self) -> str:
        return f"StepOutcome(overflow={self.overflow}, grad_norm={self.grad_norm})"


class ZeroOptimizer(torch.optim.Optimizer):
    """What `dsx_zero.shard` returns: the optimizer of a sharded model. It is a `torch.optim.Optimizer`: schedules,
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
        owners: Owners,
        replanner: Replanner,
        torch_state: TorchState,
    ) -> None:
        # Not Optimizer.__init__: groups, state and hooks are the inner optimizer's, there is no second set of them.
        self.inner = self.optimizer = inner
        """The user's optimizer, which steps the masters."""
        self.store = store
        """Where state on disk lies, as it was given to `shard`; None: nowhere."""
        self._owners, self._replanner, self._torch_state = owners, replanner, torch_state
        self._latest: StepOutcome | None = None
        self.released = False
        """Whether the model may be sharded again."""
        self._on_release: list[Callable[[], object]] = []
        self.unusable: str | None = None
        """Why a step and what reads or writes the states have to raise now; None: they need not."""
        self._watch: BackwardWatch | None = None
        self._before_forward: Any = None
        self._loss_scale: Callable[[], float] = lambda: 1.0
        self.dynamic_loss_scale = False
        """Whether the loss scale follows overflows; False without a loss scale."""
        self._nonfinite = NonFiniteWarning()
        self._failure = StepFailure()
        self.qk_clip: Any = None
        """The `dsx_zero.qk_clip.QKClip` that clips the logits of attention behind each step; None: there is none."""
        self.steps_done = 0
        """Steps so far, those that an overflow skipped included. To be set where training goes on from a checkpoint,
        before `step_during_backward`: `offload_optimizer.late_update_after` counts them.
        """
        self._take(parts)
        self._state_dict_hook: Any = None
        if parts.runtime.stage == 3:
            hook = CallingHook(partial(_give_to_torch, weakref.ref(self)))
            self._state_dict_hook = parts.runtime.model.register_state_dict_post_hook(hook)
        me = weakref.ref(self)
        for name in ("state_dict", "load_state_dict") if hasattr(inner, "state_dict") else ():
            setattr(inner, name, partial(_call_of_inner, me, type(inner), name))

    def _take(self, parts: StepParts) -> None:
        """Step with these parts from now on."""
        inner, runtime, masters, faces = self.inner, parts.runtime, parts.masters, parts.faces
        self._parts, self._unused, self._masters = parts, parts.unused, masters
        self.runtime = runtime
        """The parts this optimizer is made of."""
        self._groups = {n: g for unit in runtime.units for g in unit.groups for n in g.layout.names}
        self._by_name: dict[str, tuple[Master, ...]] = {}
        for master in masters:
            self._by_name[master.name] = (*self._by_name.get(master.name, ()), master)
        devices = {unit.groups[0].key.device for unit in runtime.trainable_units()}
        self._norm = StepNorm(runtime, next(iter(devices), torch.device("cpu")), self._failure, parts.agreement_group)
        flat = [group for unit in runtime.units for group in unit.groups]
        plain = [(p, n) for g in flat for p, n in zip(g.parameters, g.layout.names)]
        self._names = {id(p): n for p, n in plain} | {id(faces[id(p)]): n for p, n in plain if id(p) in faces}
        held = frozenset(self._names[id(p)] for group in parts.groups.shown for p in group if id(p) in self._names)
        self._frozen = Frozen(flat, masters, held, faces)
        self.placements = parts.placements
        """Where the state of each unit is kept, by class; chosen when the model is sharded and when its layout
        changes.
        """
        self.states = parts.states
        """The inner optimizer's states, wherever they live."""
        self.step_groups = parts.groups
        """Puts masters in the place of parameters in the inner optimizer's groups."""
        self._runner = StepRunner(
            inner,
            runtime,
            masters,
            groups=parts.groups,
            frozen=self._frozen,
            states=parts.states,
            failure=self._failure,
            plan=parts.plan,
            apart_plan=parts.apart_plan,
            lane=parts.lane,
            matrices=parts.matrices,
        )
        self.moved = MovedStates(runtime, parts.states)
        self._edits = Edits(flat, data_writes=parts.data_writes)
        self._beside: HostSteps | None = None
        """Steps masters beside the device's work; None: every step is made in `step`."""
        self.applies_late = parts.late_after is not None
        """Whether updates are applied a step later, from some step on (`offload_optimizer.late_update_after`)."""
        if parts.early_units or parts.undoable_units or self.applies_late:
            self._beside = HostSteps(
                runtime,
                self._runner,
                self._edits,
                units=parts.early_units,
                undoable=parts.undoable_units,
                norm_on_host=self._norm.on_host,
                channel=parts.channel,
                inner=inner,
                late_after=parts.late_after,
            )
        self._edit_agreement = EditAgreement(flat, runtime.ranks)
        runtime.gradients.watch_edits(self._edit_agreement)
        self._stepped_in_place = [p for g in flat if g.trainable and not is_partitioned(g) for p in g.parameters]
        self._model_check = ModelCheck(
            runtime.model,
            flat,
            faces={key: id(face) for key, face in faces.items()},
            moved=lambda parameter: (found := self._owners.find(parameter)) is not None and found[0] is not self,
        )
        connect_norms(inner, runtime, masters)
        for parameter, name in plain:
            self._owners.add(parameter, self, name)
        for face, name in ((faces[id(p)], n) for p, n in plain if id(p) in faces):  # what the model holds between uses
            self._owners.add(face, self, name)
        if self._watch is not None:
            runtime.gradients.follow(self._watch)
        me = weakref.ref(self)
        for group in flat:
            if is_partitioned(group):
                group.before_load = partial(_before_load, me, group)
        self._watch_forwards()

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
        return StateView(self.inner.state, self._find_master, whole=self.runtime.stage == 0)

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = checked_state(value, self._find_master)  # type: ignore[assignment]

    def _find_master(self, parameter: torch.Tensor) -> tuple[torch.Tensor | None, str] | None:
        """This rank's master of a parameter of the model, and the parameter's name; None for other tensors."""
        name = self._names.get(id(parameter))  # the model keeps them, so that no other tensor gets their identity
        if name is None:
            return None
        masters = self._by_name.get(name, ())
        return masters[0].tensor if masters else None, name

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
        self._change_layout(lambda: self._add_group(param_group))

    def replan(self) -> None:
        """Change the layout of the model, with memory for gradients and states of all that trains now (collective).

        The next forward of the model does it automatically for parameters that were unfrozen and that the optimizer
        holds; call this where only parts of the model are called. Values, states and masters stay bit for bit.
        Parameters that are frozen now keep their states.

        Raises:
            ZeroStateError, RanksDifferError: see `add_param_group`.
        """
        self._change_layout(lambda: None)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        given = param_group.get("params") if isinstance(param_group, dict) else None
        group = dict(param_group)
        if given is not None and not isinstance(given, (torch.Tensor, set)):
            group["params"] = given = list(given)  # it may be a generator
        for place, entry in enumerate([given] if isinstance(given, torch.Tensor) else given or ()):
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(parameter, torch.Tensor) and id(parameter) not in self._names:
                raise ZeroOptimizerError(
                    f"add_param_group: params[{place}] (shape {tuple(parameter.shape)}) is not a parameter of the model"
                    " that was sharded; expected tensors of model.parameters(). A layer that is new has to be in the"
                    " model before dsx_zero.shard (or shard the model again, with a new optimizer)"
                )
        self.inner.add_param_group(group)
        check_divisible(self.inner, ranks=self.runtime.ranks.size if self.runtime.stage else 1)

    @torch.no_grad()
    def _change_layout(self, change: Callable[[], None]) -> None:
        """Change the optimizer's groups and lay the model out for what trains then."""
        self._apply_late_update()
        groups = self.inner.param_groups
        count = len(groups)
        try:
            with telling(self.runtime.ranks.group):
                self._check_in_use()
                self._replanner.check(self.runtime, self.inner)
                self.collect_edits()
                change()
            prepared = self._replanner.prepare(
                self._parts, self._by_name, self.inner, self._names, edits=self._edit_agreement.of_all()
            )
        except BaseException:
            del groups[count:]
            raise
        self._abandon_step()
        self.unusable = (
            "an error happened while the model was given a new layout, and its states are not complete; start again"
            " from the last checkpoint"
        )
        self._take(prepared.carry_out())
        self.unusable = None

    def _watch_forwards(self) -> None:
        """Where a parameter can be unfrozen, look before each forward of the model whether one was."""
        if self._before_forward is not None:
            self._before_forward.remove()
            self._before_forward = None
        if self._frozen.may_grow:
            hook = CallingHook(partial(_find_unfrozen, weakref.ref(self)))
            # Before the hooks that gather: the forward that is about to begin uses the new layout.
            self._before_forward = self.runtime.model.register_forward_pre_hook(hook, prepend=True)

    def find_unfrozen(self) -> None:
        """Before a forward: if a parameter was unfrozen, change the layout of the model (collective then)."""
        if torch.is_grad_enabled() and current_graph_task_id() == -1 and self._frozen.unfrozen():
            self.replan()

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
        self._check_in_use()
        return self.runtime.gradients.no_sync()

    def gradient_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that backward gives this rank's whole gradients, to put hooks on. At stage 3 those behind the
        partitioned ones, which have no memory between uses: their values must not be read.
        """
        for unit in self.runtime.trainable_units():
            for group in unit.trainable:
                yield from group.parameters

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
            self._check_not_released()
        self.check_update_ended()
        if not self.moved.stashes:
            self._edits.take_over()  # while states are away, masters cannot follow what was written before
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
        self._abandon_step()
        self.released = True
        self.states.blocks.drop()
        if self._before_forward is not None:
            self._before_forward.remove()
        self.runtime.gradients.remove_hooks()
        if self._unused is not None:
            self._unused.remove_hooks()
        if self._state_dict_hook is not None:
            self._state_dict_hook.remove()
        self.runtime.publisher.remove_hooks()
        self.runtime.groups.give_back()
        for callback in self._on_release:
            callback()

    def call_on_release(self, callback: Callable[[], object]) -> None:
        """Call `callback` when this optimizer is released: by `release`, or because its model is sharded again."""
        self._on_release.append(callback)

    def _check_in_use(self) -> None:
        self._check_not_released()
        if self.moved.stashes:
            self.moved.check()

    def _check_not_released(self) -> None:
        if self.released:
            raise ZeroStateError(
                "this optimizer was released: release() was called (or destroy() of its engine), or its model was"
                " sharded again; use the optimizer that dsx_zero.shard returned last"
            )
        if self.unusable is not None:
            raise ZeroStateError(self.unusable)

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
                that works on local gradients each rank clips its own by its own norm, which is said once.

        Raises:
            ZeroStateError: the optimizer was released; the model holds other parameters than those that were sharded;
                parameters were written differently on the ranks; one was unfrozen and no forward of the model has run
                since; or, with `ignore_unused_parameters: false`, one got no gradient.
            ZeroOptimizerError: tensors were added to the parameter groups or taken away.
        """
        self._check_in_use()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run = self.runtime
        self.check_step()
        self._failure.begin()
        if self._unused is not None:
            self._unused.check()
        local = False
        if run.averaging is not None:
            run.averaging.announce_clipping(max_norm)
            local = run.averaging.local()
        beside = self._beside
        taken = beside is not None and (beside.under_way or bool(beside.groups()) or beside.is_late(self.steps_done))
        if self._runner.blocks is not None and not taken:  # a disk is busy while the norm is computed
            self._failure.run(self._runner.read_ahead, None)
        self._norm.finish_gradients(local=local)
        if beside is not None:
            beside.complete(grad_scale, max_norm)
        norm = self._norm.norm(grad_scale, needed=bool(max_norm) or run.checks_overflow or not local, local=local)
        late = beside is not None and beside.is_late(self.steps_done)
        self.steps_done += 1
        self._apply_late_update()
        if run.checks_overflow:
            everywhere = (self._norm.sum_over_ranks(norm) if local else norm).cpu()  # waits, unless it is there already
            if not local:
                norm = everywhere  # the rest of the step uses what the host has read
            if not torch.isfinite(everywhere).item():
                self._conclude(None)
                self._runner.forget_ahead()
                self._failure.end()
                self._end_step_beside()
                outcome = StepOutcome(True, everywhere, loss)
                self._latest = outcome.without_loss()  # the loss may hold a graph
                return outcome
        self._nonfinite.steps += 1
        if norm.device.type != "cpu" or not math.isfinite(norm.item()):
            self._nonfinite.look(run, norm, everywhere=not local)
        factor = self._failure.run(lambda: clip_factor(norm, grad_scale, max_norm), 1.0)
        stepped, factor = self._conclude(factor)
        self._apply(factor, stepped, late=late)
        self._failure.end()
        self._end_step_beside()
        outcome = StepOutcome(False, None if local else norm, loss)
        self._latest = outcome.without_loss()
        return outcome

    def _conclude(self, factor: Any) -> tuple[Collection[int], Any]:
        """See `HostSteps.conclude`."""
        return ((), factor) if self._beside is None else self._beside.conclude(factor)

    def _end_step_beside(self) -> None:
        if self._beside is not None:
            self._beside.end_step()

    def _apply(self, factor: float | torch.Tensor, stepped: Collection[int], *, late: bool) -> None:
        """Step the masters with the gradients times `factor`, and publish them; or begin to, for the next step."""
        if late and self._beside is not None:
            self._edits.take_over()
            self._beside.begin_late(factor)
            return
        edited = self._edits.groups
        if self._beside is not None:  # edits of groups that were stepped already were taken over before
            done = self._beside.groups()
            edited = [group for group in edited if group not in done]
        self._failure.run(lambda: self._edits.take_over(edited), None)
        self._runner.run(factor, stepped)
        self._publish_written()

    def defer_failures(self) -> None:
        """From now on a rank on which a part of `step` fails takes part in the step's collectives, and raises at its
        end. For an owner that lets all ranks, also those of other stages, agree behind each step whether it was done:
        where one rank has failed, parameters and states of the ranks belong to different steps.
        """
        self._failure.deferred = True

    def check_step(self) -> None:
        """What `step` checks before it communicates. Raises what `step` raises then."""
        self._check_in_use()
        self._model_check.check()
        self.step_groups.check()
        self._frozen.check()

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
        self._check_in_use()
        self.step_groups.check()
        self._frozen.check()
        beside = self._beside
        return beside is not None and not beside.is_late(self.steps_done) and beside.announce(grad_scale, max_norm)

    def _apply_late_update(self) -> None:
        if self._beside is not None and self._beside.finish_late():
            self._publish_written()

    def _publish_written(self) -> None:
        self.runtime.publisher.finish()
        self._parameters_written()

    def listen(self, on_span: OnSpan) -> Callable[[], None]:
        """Tell `on_span` of copies between tiers and of steps on the host's own thread, for a timeline.

        Args:
            on_span: gets the lane ("device-host" or "host step"), what is done, and bytes or elements; it is done
                inside the context that is returned. Called from several threads.

        Returns:
            What ends it.
        """
        runner = self._runner
        quiet = runner.apart.on_host_step

        def step(sub_group: int) -> AbstractContextManager[object]:
            return on_span("host step", f"sub-group {sub_group}", runner.apart.plan.sub_groups[sub_group].numel)

        def copy(what: str, nbytes: int) -> AbstractContextManager[object]:
            return on_span("device-host", what, nbytes)

        lanes = [lane for lane in self._parts.moving_lanes if hasattr(lane, "on_transfer")]
        runner.apart.on_host_step = step
        for lane in lanes:
            lane.on_transfer = copy  # pyright: ignore[reportAttributeAccessIssue]

        def end() -> None:
            runner.apart.on_host_step = quiet
            for lane in lanes:
                lane.on_transfer = None  # pyright: ignore[reportAttributeAccessIssue]

        return end

    def check_model(self) -> None:
        """Compare the model with what was sharded. Everything that reads or writes the states for checkpoints does it.

        Raises:
            ZeroStateError: a parameter or its memory was replaced, added or removed; names it. Or states are offloaded,
                or a step has begun and not ended.
        """
        self.check_states()
        self.check_update_ended()
        self._model_check.check()

    def check_update_ended(self) -> None:
        """Refuse to read or write masters and states that a thread steps. Raises ZeroStateError."""
        if self._beside is not None:
            self._beside.check_ended()

    def _abandon_step(self) -> None:
        """Forget a step that has begun, because masters and states are about to get other values."""
        if self._beside is not None:
            self._beside.abandon()

    def check_states(self, *kinds: OffloadStateTypeEnum) -> None:
        """Refuse what needs values (of these classes; none: of all), while `offload_states` has moved some of them.
        Raises ZeroStateError.
        """
        self.moved.check(*kinds)

    def follow_backward(self, watch: BackwardWatch) -> None:
        """Let the owner of the loss scale have a word on every backward: see `BackwardWatch`."""
        self._watch = watch
        self.runtime.gradients.follow(watch)

    def _parameters_written(self) -> None:
        """Parameters have new values that the user did not write: earlier graphs are stale, as after a step of a
        plain optimizer.
        """
        torch.autograd.graph.increment_version(self._stepped_in_place)
        self._edits.settle()
        self._edit_agreement.settle()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make parameters what all steps so far mean (collective): apply the update that
        `offload_optimizer.late_update_after` has left for the next step, and make parameters the same on all ranks
        where the optimizer lets them differ between steps (0/1 Adam).
        """
        run = self.runtime
        self._apply_late_update()
        if run.averaging is None:
            return
        self.check_states()
        run.averaging.synchronize()
        for unit in run.trainable_units():
            for group in unit.trainable:
                write_parameters(group)
        self._parameters_written()

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
        """Factor on the loss of the next backward, from the scaler given to `follow_loss_scale`; 1.0 without one."""
        return self._loss_scale()

    cur_scale = loss_scale

    def follow_loss_scale(self, scale: Callable[[], float], *, dynamic: bool = False) -> None:
        """Let `loss_scale` and `dynamic_loss_scale` show what the owner of the scaler uses; gradients stay as they
        are.
        """
        self._loss_scale, self.dynamic_loss_scale = scale, dynamic

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce over the ranks what backwards have accumulated so far, `no_sync` or not. Collective; `step` does it
        too.
        """
        self._check_in_use()
        self.runtime.gradients.complete()

    def free_gathered(self) -> None:
        """Stage 3: free every gathered parameter, read ahead or kept for reuse; outside of forward and backward.

        Every rank must call it. At other stages parameters are always whole, and nothing happens.
        """
        self._check_not_released()  # states that offload_states() has moved are not needed
        self.runtime.publisher.free_gathered()

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Make the masters equal to the parameters, for values that were written in a way the next step does not
        notice (`p.data`).
        """
        self.check_update_ended()
        for unit in self.runtime.trainable_units():
            for group in unit.trainable:
                refresh_master(group)
        self._edits.settle()

    # State ------------------------------------------------------------------------------------------------------------

    def slices(self, *, lazily: bool = False) -> Iterator[ParamSlice]:
        """What this rank owns of every parameter, frozen ones too, in definition order; over all ranks each element
        once. `lazily`: values that are not in memory are given as `StoredValues`, whose `fetch` reads them. Values
        that `offload_states` has moved are read in host memory.
        """
        self.collect_edits()
        return iter_slices(self.runtime, self._by_name, self.states, where=self.moved.lying, lazily=lazily)

    def held_slices(self, *, lazily: bool = False) -> Iterator[ParamSlice]:
        """Like `slices`, but everything that this rank keeps: whole tensors at stage 0, whole frozen ones up to
        stage 2.
        """
        self.collect_edits()
        where = self.moved.lying
        return iter_slices(self.runtime, self._by_name, self.states, where=where, held=True, lazily=lazily)

    def read_slices(self, reader: Reader) -> SliceLoad:
        """Read everything this rank holds from ranges of named tensors and check it; nothing is changed before
        `install()`.

        Not collective, unlike `install()`: ranks can agree that all of them have read well before one of them changes
        its model.

        Raises:
            ZeroStateError: optimizer states are incomplete, or do not fit the optimizer.
        """
        self.check_states()
        self._abandon_step()
        self.check_model()
        with self.step_groups.masters():
            load = read_slices(self.runtime, self._by_name, self.states, reader, from_masters=self.runtime.load_masters)
        load.call_when_installed(self._parameters_written)
        return load

    def load_slices(self, reader: Reader) -> None:
        """Fill parameters, masters and optimizer states from ranges of named tensors (collective). See
        `dsx_zero.Reader`.
        """
        self.read_slices(reader).install()

    def homes_of(self, name: str) -> Iterator[tuple[Home, LocalSlice]]:
        """Where this rank keeps the values of a parameter that all others follow: its master, or a frozen parameter
        itself; and which elements lie there. After writing: `parameters_loaded`.
        """
        group = self._groups[name]
        whole = self.runtime.stage == 0 or (self.runtime.stage < 3 and not group.trainable)
        index = group.layout.index(name)
        part = group.whole_slice(index) if whole else group.layout.local_slice(name, group.rank)
        home = group.master if group.trainable else None
        if home is None:
            home = group.all_visible() if whole else group.shard
        if part is not None:
            yield home, part

    def copy_of(self, what: torch.nn.Module | Iterable[str] | None = None, *, device: Any = None) -> ModelCopy:
        """A second set of values, sharded over the ranks as the model's are: for an EMA, a reference or a teacher
        (collective). See `ModelCopy`.

        Args:
            what: a part of the model, or names of parameters; None: all of it, with its buffers.
            device: where the copy lies ("cpu" for host memory); None: where the masters are.

        Raises:
            ZeroStateError: there is no such part or name.
        """
        return ModelCopy(self, what, device)

    @torch.no_grad()
    def parameters_loaded(self) -> None:
        """Masters and frozen parameters were written through `homes_of`: make that visible (collective)."""
        publish_masters(self.runtime)
        self._parameters_written()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's slices by parameter name ("slices"), and "param_groups". Where every rank has whole states, also
        "state", as of a plain optimizer. Tensors are not copied.

        Called by torch's functions for state dicts and checkpoints (`get_optimizer_state_dict`, `dcp.save`), it is
        collective and gives what those expect: "state" and "param_groups" as of a plain optimizer, each tensor whole
        (`full_state_dict=True`) or as a `ShardView` of this rank's part.
        """
        form = self._torch_state.asked_for()
        if form is not None:
            return self._torch_state.of_optimizer(self, form)
        self.collect_edits()
        found = save_local(self)
        if self.runtime.stage > 0 or not hasattr(self.inner, "state_dict"):
            return found
        with _members_of_states(self):
            whole = type(self.inner).state_dict(self.inner)
        for group, saved in zip(found["param_groups"], whole["param_groups"]):
            group["params"] = saved["params"]
        return {**found, "state": {number: _lying(self, states) for number, states in whole["state"].items()}}

    def collect_edits(self) -> None:
        """Before this rank's values are read: check that they are the model's, and let masters follow edits."""
        self._check_not_released()
        if not self.moved.stashes:
            self.check_model()
            self._edits.take_over()
            return
        self.check_update_ended()
        parameters_away = OffloadStateTypeEnum.lp_params in self.moved.stashes  # then nobody can have written them
        if self.runtime.averaging is not None or (not parameters_away and self._edits.were_written()):
            self.check_states()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank of a job with the same stage and number of ranks (collective).

        The state dict of a plain optimizer, with whole states that are the same on every rank, is taken at any stage.

        Raises:
            ZeroStateError: the slices are not this rank's. `dsx_zero.load_full_state_dict` has no such limit.
        """
        self.check_states()
        self._abandon_step()
        plain = isinstance(state_dict, dict) and {"state", "param_groups"} <= set(state_dict)
        if plain and "slices" not in state_dict:
            self._torch_state.load(self, state_dict)
        else:
            load_local(self, state_dict)

    @contextmanager
    def whole_states(self, asked: str) -> Iterator[None]:
        """Inside the context the inner optimizer's groups hold what its states belong to, in the places of the model's
        parameters.

        Raises:
            ZeroStateError: this rank's states are parts of tensors.
        """
        if self.runtime.stage > 0:
            raise ZeroStateError(
                f"{asked}: the states of this optimizer are sharded over the ranks. With what dsx_zero.shard returned"
                " (an engine's engine.optimizer): dsx_zero.full_state_dict(optimizer) and load_full_state_dict, on"
                " every rank, for whole states; its state_dict() and load_state_dict() for this rank's part"
            )
        self.check_states()
        with _members_of_states(self):
            yield

    # Single parameters (what `dsx_zero.access` works through) ------------------------------------------------------

    def group_of(self, name: str) -> FlatGroup:
        """The flat group of a parameter, by its first name."""
        return self._groups[name]

    def masters_of(self, name: str) -> tuple[Master, ...]:
        """The masters of a parameter, by its first name; none where this rank owns nothing of it."""
        return self._by_name.get(name, ())

    @property
    def step_plan(self) -> StepPlan:
        """What a step does, as data: `print(optimizer.step_plan)`."""
        return self._runner.plan

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank, each storage counted once: params, grads, master (with what tells edits),
        optimizer, and idle message buffers.
        """
        return {kind: sum(tiers.values()) for kind, tiers in self.state_bytes_by_tier().items()}

    def state_bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """`state_bytes`, each class divided by where its bytes lie: "device", "host", "disk", or a tier's own name."""
        if self._beside is not None:
            self._beside.join()  # its thread moves states
        counted = count_bytes(self.runtime, self.states)
        counted["master"]["device"] = counted["master"].get("device", 0) + self._edits.nbytes()
        if self._beside is not None:
            counted["grads"]["host"] = counted["grads"].get("host", 0) + self._beside.kept.nbytes
        counted["params"]["host"] = counted["params"].get("host", 0) + self._runner.apart.nbytes
        counted["optimizer"]["host"] = counted["optimizer"].get("host", 0) + self._runner.apart.old_nbytes
        for kind, nbytes in self.moved.nbytes().items():
            counted[kind]["host"] = counted[kind].get("host", 0) + nbytes
        return {kind: {tier: n for tier, n in tiers.items() if n} for kind, tiers in counted.items()}


def parameter_slice(
    optimizer: ZeroOptimizer, name: str, *, whole: bool
) -> tuple[LocalSlice, Callable[[], torch.Tensor]]:
    """The elements of a parameter that this rank owns, or all of one that every rank keeps (`whole`), and a function
    that reads them, 1-D, wherever they lie: in host memory after `offload_states`, on disk.
    """
    group = optimizer.group_of(name)
    index = group.layout.index(name)
    part = group.whole_slice(index) if whole else group.layout.local_slice(name, group.rank)
    part, home = part or LocalSlice(0, 0, 0), group.all_visible() if whole else group.shard
    return part, lambda: read_elements(home, part.offset, part.numel, optimizer.moved.lying)


def check_readable(optimizer: ZeroOptimizer) -> None:
    """Check what reading parameters from outside needs, also while states are offloaded.

    Raises:
        ZeroStateError: the optimizer was released, a step has begun and not ended, or parameters were replaced.
    """
    optimizer._check_not_released()
    if optimizer.moved.stashes:
        optimizer.check_update_ended()
    else:
        optimizer.check_model()


def _lying(optimizer: ZeroOptimizer, states: dict[str, Any]) -> dict[str, Any]:
    """The states of a parameter where they lie: in host memory, if they were offloaded."""
    return {k: optimizer.moved.lying(v) if isinstance(v, torch.Tensor) else v for k, v in states.items()}


@contextmanager
def _members_of_states(optimizer: ZeroOptimizer) -> Iterator[None]:
    """Inside the context the inner optimizer's groups hold the masters of parameters."""
    found = [[(optimizer._find_master(p) or (None, ""))[0] for p in group] for group in optimizer.step_groups.shown]
    members = [
        [p if master is None else master for p, master in zip(group, masters)]
        for group, masters in zip(optimizer.step_groups.shown, found)
    ]
    with optimizer.step_groups.masters(members):
        yield
