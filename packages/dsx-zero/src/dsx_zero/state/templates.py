"""The states that an optimizer keeps per parameter, and their form. A copy of the optimizer shows it in one step on a
sample parameter.

A state is either elementwise (one value per element of the parameter, cut as the parameter is cut) or single (one value
per parameter, such as `step`). The sample parameter has two elements, so that the two kinds differ in size. For a
parameter of one element the shape of a state does not tell them apart: a `step` of shape `(1,)` looks like a momentum.
"""

from __future__ import annotations

from typing import Any

import torch

from ..step.masters import Master, needs_whole_tensors
from ..step.matrix_rules import matrix_rule, stateful
from ..step.sparse import needs_rows
from ..step.states import is_container
from ..step.trial import probe_of, step_of

__all__ = ["StateTemplates", "is_single"]

_SAMPLE = 2  # elements of the sample parameter


def is_single(kind: Any) -> bool:
    """Is this example of a state (from a template or from the optimizer itself) a single value? False for None."""
    return isinstance(kind, (int, float)) or (isinstance(kind, torch.Tensor) and kind.numel() == 1)


class StateTemplates:
    """Examples of the states that `inner` keeps, per parameter group, dtype and device."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, master: Master) -> dict[str, Any]:
        """Names and examples of a master's states. Single states have their own shape, elementwise states two
        elements.
        """
        for number, group in enumerate(self._inner.param_groups):
            if any(tensor is master.tensor for tensor in group["params"]):
                rule, layout = matrix_rule(self._inner), master.group.layout
                logical = layout.shapes[layout.index(master.name)]
                whole = tuple(master.shape) if needs_whole_tensors(self._inner) else None
                matrices = rule is not None and bool(rule.matrices(logical, group))
                key = (number, master.tensor.dtype, master.tensor.device, whole, matrices)
                if key not in self._known:
                    self._known[key] = self._learn(number, master.tensor, whole, logical if matrices else None)
                return self._known[key]
        return {}

    def containers_of(self, master: Master) -> dict[str, Any]:
        """The states that are lists or objects: what is no tensor in them has to be there before a load."""
        return {key: value for key, value in self.of(master).items() if is_container(value)}

    def _learn(
        self,
        number: int,
        like: torch.Tensor,
        whole: tuple[int, ...] | None,
        matrices: tuple[int, ...] | None,
    ) -> dict[str, Any]:
        """`number`: of the parameter group; `matrices`: the shape of a parameter that consists of matrices, for a rule
        that goes by them.
        """
        # An optimizer that needs whole tensors keeps states that depend on their shape.
        shape = (_SAMPLE,) if whole is None else whole
        if needs_rows(self._inner):
            shape = (_SAMPLE, 1)
        sample = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        if hasattr(self._inner, "state_template"):  # such an optimizer communicates in its step, so none is done
            return self._inner.state_template(sample)  # type: ignore[attr-defined]
        probe = probe_of(self._inner, number, [sample])
        sample.grad = torch.zeros_like(sample)
        if needs_rows(self._inner):
            sample.grad = torch.sparse_coo_tensor(
                torch.arange(_SAMPLE, device="cpu")[None], torch.zeros_like(sample), shape
            )
        rule, options = matrix_rule(probe), probe.param_groups[number]
        with torch.no_grad():  # as the step of an optimizer does itself
            if rule is None:
                step_of(probe)(probe)
            elif matrices is not None:
                rule.direction(sample, sample.grad, options)
            else:
                rule.element_wise(sample, sample.grad, options)
        kept = None if matrices is None else stateful(rule)
        if kept is not None:  # their shapes are those of the parameter's matrices, and asked for by name
            of_matrices = {
                key: torch.zeros(_SAMPLE, device="cpu") for key in kept.state_shapes(matrices or (), options)
            }
            return {**probe.state[sample], **of_matrices}
        return {key: value for key, value in probe.state[sample].items() if value is not None}
