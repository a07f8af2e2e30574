"""The common part of optimizers on matrices: the choice of tensors and matrices, AdamW for the rest, and a plain step.

A rule on matrices is element-wise but for one function of a whole matrix. A subclass gives its parts: `direction` and
`apply` on elements, `of_matrix` on a matrix; `step` here is one after the other. A sharded optimizer (dsx-zero) calls
them itself: `direction` and `apply` on the elements of a rank, `of_matrix` where the matrix was brought together.

*Which tensors.* `use_muon` of a parameter group says it, whatever the rule's name; groups without it are divided by
dimension: two or more are matrices. Embeddings and heads belong to AdamW: give them a group with `use_muon` False.

*Which matrices.* A weight may be several matrices in one tensor, whose singular values have nothing to do with each
other. `stacked`: a tensor of three dimensions is a stack of matrices (packed experts), or one matrix with the first
dimension as rows (a convolution over one dimension); it has to be said. `split_rows`: parts below each other (queries,
keys and values; gate and up; one per head), equal ones or of these sizes. `split_columns`: equal parts beside each
other (heads of an output projection, gate and up of packed experts). Tensors of more dimensions are one matrix with the
first dimension as rows.

*States of a matrix.* A rule may keep tensors that belong to a matrix and not to its elements (a basis, moments in a
smaller space). `of_matrix` is given them and changes them in place. In `state` those of a tensor's matrices are one
tensor: of the shape of one, stacked where the matrices are alike, else flat, one behind the other. A sharded optimizer
cuts them in proportion to the elements of their matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HyperparameterError, TensorError

__all__ = ["MatrixOptimizer", "check_rates", "check_split"]

Shape = tuple[int, ...]


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of optimizers with a rule on matrices.

    Args:
        params: parameters, or groups of them.
        defaults: settings of groups.
        rates: learning rates of groups that do not say theirs: with the rule on matrices (True), and without.

    Raises:
        HyperparameterError: a setting is out of its range.
        TensorError: a group for the rule has a tensor of less than two dimensions, or one that cannot be split so.
    """

    feeds_back = False
    """Does `of_matrix` give a second tensor, for `feed_back`?"""

    def __init__(self, params: Any, defaults: dict[str, Any], rates: Mapping[bool, float]) -> None:
        self.check_settings(defaults)
        super().__init__([found for group in _groups(params) for found in _divided(group, rates)], defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer's. Raises HyperparameterError and TensorError as the constructor does."""
        self.check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"] if group["use_muon"] else ():
                self.matrices(tuple(param.shape), group)
        except TensorError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self.matrices(tuple(param.shape), group):
                    self._step_matrices(param, group)
                else:
                    self.element_wise(param, param.grad, group)
        return loss

    def _step_matrices(self, param: Tensor, group: Mapping[str, Any]) -> None:
        direction, values, start = self.direction(param, param.grad, group).reshape(-1), param.reshape(-1), 0
        fed_back = []
        for (rows, columns), states in self._states_of(param, group):
            stop = start + rows * columns
            found = self.of_matrix(direction[start:stop].view(rows, columns), group, states)
            update = found[0] if self.feeds_back else found
            self.apply(values[start:stop], update.reshape(-1), (rows, columns), group)
            fed_back += [found[1].reshape(-1)] if self.feeds_back else []
            start = stop
        if fed_back:
            self.feed_back(param, torch.cat(fed_back).view(param.shape), group)
        if not param.is_contiguous():  # `values` is a copy
            param.copy_(values.view(param.shape))

    def _states_of(
        self, param: Tensor, group: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, int], dict[str, Tensor]]]:
        """Each matrix of a parameter, with views of its states."""
        matrices, kept = self.matrices(tuple(param.shape), group), self.state[param]
        each = [self.matrix_states(matrix, group) for matrix in matrices]
        for key, whole in self.state_shapes(tuple(param.shape), group).items():
            if key not in kept:
                parts = [
                    self.initial_state(key, shapes[key], 0, math.prod(shapes[key]), group, param.device)
                    for shapes in each
                ]
                kept[key] = torch.cat(parts).view(whole)
        starts = dict.fromkeys(each[0], 0)
        for matrix, shapes in zip(matrices, each):
            views = {}
            for key, shape in shapes.items():
                stop = starts[key] + math.prod(shape)
                views[key] = kept[key].view(-1)[starts[key] : stop].view(shape)
                starts[key] = stop
            yield matrix, views

    # The parts of the rule --------------------------------------------------------------------------------------------

    def check_settings(self, group: Mapping[str, Any]) -> None:
        """Raise HyperparameterError if a setting of a group is out of its range."""
        raise NotImplementedError

    def direction(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the states of these elements; what the matrix consists of, in the dtype of `grad`. It is only read."""
        raise NotImplementedError

    def of_matrix(self, matrix: Tensor, group: Mapping[str, Any], states: Mapping[str, Tensor] | None = None) -> Any:
        """The function of a whole matrix (rows, columns), which changes `states` and nothing else: a tensor of its
        shape, or two where the rule feeds back.
        """
        raise NotImplementedError

    def apply(self, param: Tensor, update: Tensor, matrix: tuple[int, int], group: Mapping[str, Any]) -> None:
        """Change elements of a matrix of this shape by the elements of its update."""
        raise NotImplementedError

    def work(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> float:
        """Floating-point operations of `of_matrix`."""
        raise NotImplementedError

    def message_dtype(self, group: Mapping[str, Any], device: torch.device) -> torch.dtype:
        """The dtype of directions, states and updates, where matrices are computed on `device`."""
        return torch.float32

    def feed_back(self, param: Tensor, result: Tensor, group: Mapping[str, Any]) -> None:
        """Change the states of elements by the second result of `of_matrix`."""
        raise NotImplementedError

    def matrix_states(self, matrix: tuple[int, int], group: Mapping[str, Any]) -> dict[str, Shape]:
        """The shapes of what is kept of a matrix of this shape, by name; fp32."""
        return {}

    def initial_state(
        self, key: str, shape: Shape, start: int, stop: int, group: Mapping[str, Any], device: torch.device
    ) -> Tensor:
        """Elements [start, stop) of a state of a matrix before its first step, 1-D. `shape`: of the whole state."""
        return torch.zeros(stop - start, dtype=torch.float32, device=device)

    def state_shapes(self, shape: Sequence[int], group: Mapping[str, Any]) -> dict[str, Shape]:
        """The shapes of what is kept of a whole tensor's matrices, by name."""
        each = [self.matrix_states(matrix, group) for matrix in self.matrices(shape, group)]
        found: dict[str, Shape] = {}
        for key in each[0] if each else ():
            shapes = [one[key] for one in each]
            if len(set(shapes)) > 1:
                found[key] = (sum(map(math.prod, shapes)),)
            else:
                found[key] = shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0])
        return found

    def matrices(self, shape: Sequence[int], group: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the matrices that a tensor consists of, one behind the other in row-major order; none for
        a tensor that is stepped element by element.

        Raises:
            TensorError: it does not consist of such matrices.
        """
        if not group["use_muon"] or 0 in shape:
            return ()
        name = type(self).__name__
        if len(shape) < 2:
            raise TensorError(
                f"{name}: got a tensor of shape {tuple(shape)} in a group with use_muon, expected matrices; give it a"
                " group with use_muon=False"
            )
        if len(shape) == 3 and group["stacked"] is None:
            raise TensorError(
                f"{name}: got a tensor of shape {tuple(shape)}; expected to be told what its three dimensions are:"
                f" stacked=True for {shape[0]} matrices (packed experts), stacked=False for one matrix of {shape[0]}"
                " rows (a convolution)"
            )
        stack = shape[0] if len(shape) == 3 and group["stacked"] else 1
        rows = shape[1] if stack > 1 or (len(shape) == 3 and group["stacked"]) else shape[0]
        columns = math.prod(shape) // (stack * rows)
        sizes, parts = group["split_rows"], group.get("split_columns", 1)
        if isinstance(sizes, int):
            sizes = (rows // sizes,) * sizes
        if sum(sizes) != rows or columns % parts:
            raise TensorError(
                f"{name}: got split_rows={group['split_rows']} and split_columns={parts} for matrices of {rows} rows"
                f" and {columns} columns (shape {tuple(shape)}), which these do not divide"
            )
        return tuple((size, columns) for size in sizes) * stack

    def element_wise(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Step elements of a tensor that is no matrix, by AdamW."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        count, (beta1, beta2) = state["step"].item(), group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**count))


def _groups(params: Any) -> list[dict[str, Any]]:
    found = list(params)
    return [dict(group) for group in found] if found and isinstance(found[0], dict) else [{"params": found}]


def _divided(group: dict[str, Any], rates: Mapping[bool, float]) -> list[dict[str, Any]]:
    """A group as one that says `use_muon`, or as two."""
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    if "use_muon" in group:
        return [{"lr": rates[bool(group["use_muon"])], **group, "params": params}]
    parts = {use: [p for p in params if (p.dim() >= 2) == use] for use in (True, False)}
    return [{"lr": rates[use], **group, "params": some, "use_muon": use} for use, some in parts.items() if some]


def check_rates(group: Mapping[str, Any], *names: str) -> None:
    """Raise HyperparameterError if AdamW's settings, the momentum or one of these numbers is out of its range."""
    betas = group["betas"]
    momentum = {"momentum": group["momentum"]} if "momentum" in group else {}
    for name, value in {**momentum, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
        if not 0 <= value < 1:
            raise HyperparameterError(f"{name}: got {value}, expected at least 0 and less than 1")
    for name in ("lr", "weight_decay", "eps", *names):
        if not group[name] >= 0:
            raise HyperparameterError(f"{name}: got {group[name]}, expected at least 0")


def check_split(group: Mapping[str, Any], *counts: str) -> None:
    """Raise HyperparameterError if `split_rows`, or one of these numbers, is no whole number (or numbers) above 0."""
    rows = group["split_rows"]
    numbers = {name: (group[name],) for name in counts}
    numbers["split_rows"] = (rows,) if isinstance(rows, int) else tuple(rows)
    for name, values in numbers.items():
        if not values or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in values):
            raise HyperparameterError(f"{name}: got {group[name]!r}, expected a whole number of at least 1")
