"""The parameter groups and the state of the optimizer: what its user sees, and what its `step` sees.

A user finds in `optimizer.param_groups` what was put there: the model's parameters. So code that walks them
(`clip_grad_norm_`, weight decay by hand, `torch.amp.GradScaler`) treats the same tensors in every stage. The optimizer
steps masters, of which this rank holds slices: during a step they take the places of the parameters. States are kept by
master; `StateView` gives or refuses the state of a parameter.

Optimizers that communicate by themselves (1-bit) are left out: they read their groups between steps too, so their
groups hold the masters all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ZeroOptimizerError, ZeroStateError
from ..grads.averaging import averages_itself

__all__ = ["StateView", "StepGroups"]


class StepGroups:
    """Exchanges the tensors in the groups of `optimizer`, which holds masters when this object is made.

    Args:
        optimizer: the user's optimizer.
        parameters: the model's parameters of each group, as the user put them there.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._masters = [group["params"] for group in optimizer.param_groups]
        keeps_masters = averages_itself(optimizer)
        self._shown = self._masters if keeps_masters else [list(group) for group in parameters]
        self._known = [[id(tensor) for tensor in group] for group in self._shown]
        self._put(self._shown)

    @property
    def shown(self) -> list[list[torch.Tensor]]:
        """The tensors of each group as the user sees them."""
        return self._shown

    def _put(self, tensors: Sequence[list[torch.Tensor]]) -> None:
        for group, members in zip(self._optimizer.param_groups, tensors):
            group["params"] = members

    def check(self) -> None:
        """Raises ZeroOptimizerError if tensors were added to the groups, taken away or exchanged."""
        groups = self._optimizer.param_groups
        for index, (group, known) in enumerate(zip(groups, self._known)):
            found = [id(tensor) for tensor in group["params"]]
            if found != known:
                raise ZeroOptimizerError(
                    f"param_groups[{index}]['params'] was changed: got {len(found)} tensors, expected the {len(known)}"
                    " that were there when the model was sharded, in their order. Parameters that shall train too come"
                    " with optimizer.add_param_group({'params': [...]}) on every rank; those that shall not are frozen"
                    " with requires_grad_(False)"
                )
        if len(groups) != len(self._known):
            raise ZeroOptimizerError(
                f"param_groups: got {len(groups)} groups, expected {len(self._known)}. A group that comes later is"
                " added with optimizer.add_param_group(group) on every rank, which makes places for its gradients and"
                " states"
            )

    def numbers(self) -> dict[int, int]:
        """The number of the group that a master belongs to, by the `id` of its tensor."""
        return {id(tensor): number for number, group in enumerate(self._masters) for tensor in group}

    def subset(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each group, its masters that are among `tensors`."""
        wanted = {id(tensor) for tensor in tensors}
        return [[tensor for tensor in group if id(tensor) in wanted] for group in self._masters]

    @contextmanager
    def masters(self, members: Sequence[list[torch.Tensor]] | None = None) -> Iterator[None]:
        """Inside the context the groups hold this rank's masters: all of them, or those of a `subset`."""
        self._put(self._masters if members is None else members)
        try:
            yield
        finally:
            self._put(self._shown)


class StateView(MutableMapping[Any, Any]):
    """The state of the user's optimizer, which is kept by master. For a parameter of the model it gives the master's
    state or raises; it never gives an empty state.

    Args:
        state: the optimizer's own mapping.
        find: gives the master of a parameter of the model and the parameter's name; None for other keys.
        whole: whether masters are whole tensors, whose state is the parameter's.
    """

    def __init__(
        self,
        state: MutableMapping[Any, Any],
        find: Callable[[Any], tuple[torch.Tensor | None, str] | None],
        *,
        whole: bool,
    ) -> None:
        self._state, self._find, self._whole = state, find, whole

    def _key(self, key: Any) -> Any:
        found = self._find(key) if isinstance(key, torch.Tensor) else None
        if found is None:
            return key
        master, name = found
        if self._whole and master is not None:
            return master
        raise ZeroStateError(
            f"optimizer.state[{name!r}]: the states of a sharded parameter are divided among the ranks; read them with"
            " dsx_zero.safe_get_full_optimizer_state(p, key) on every rank (this rank's slice:"
            " safe_get_local_optimizer_state), write them with safe_set_full_optimizer_state(p, value, key)"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._state[self._key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._key(key)]

    def __contains__(self, key: object) -> bool:
        found = self._find(key) if isinstance(key, torch.Tensor) else None
        return (key if found is None else found[0]) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return repr(self._state)


def checked_state(state: Any, find: Callable[[Any], object | None]) -> Mapping[Any, Any]:
    """Check what a script assigns to `optimizer.state`; an empty mapping resets the states. Raises ZeroStateError if
    its keys are parameters of the model.
    """
    if not isinstance(state, MutableMapping) or any(isinstance(k, torch.Tensor) and find(k) is not None for k in state):
        raise ZeroStateError(
            "optimizer.state = ...: got states of whole parameters, expected an empty mapping, which starts them again;"
            " to load states use load_state_dict, or set them one by one with dsx_zero.safe_set_full_optimizer_state"
        )
    return state
