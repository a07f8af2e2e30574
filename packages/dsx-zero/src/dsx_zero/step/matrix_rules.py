"""Rules that are element-wise but for one function of a whole matrix, as a sharded step uses them.

Muon's is the best known: momentum, weight decay and the update are element-wise, and between them the momentum of a
matrix is orthogonalised. Such a rule can be stepped on slices of a tensor, if the slices of what the function takes
are brought together for it (`matrices.py`). An optimizer offers its rule by the methods of `MatrixRule`; its `step`
is then not called. `torch.optim.Muon` has no such methods, so that its rule stands here.

A rule may keep states of a whole matrix (`StatefulRule`: Dion's basis, moments of low rank), which then travel with the
matrix. Left out are optimizers that keep such states and do not offer their rule (Shampoo, Adafactor): they get whole
tensors (`masters.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from ..plan.matrices import MatrixState
from ..torch_names import adjust_lr_of_muon, newton_schulz_of_muon

__all__ = ["MatrixRule", "StatefulRule", "has_step_of", "matrix_rule", "matrix_states", "stateful"]

Settings = Mapping[str, Any]


class MatrixRule(Protocol):
    """The parts of a rule, which work on parts of tensors. `group` is the parameter group, for its settings."""

    def matrices(self, shape: Sequence[int], group: Settings) -> Sequence[tuple[int, int]]:
        """(rows, columns) of the matrices that a tensor consists of, one behind the other in row-major order; none for
        a tensor that is stepped element by element.
        """
        ...

    def message_dtype(self, group: Settings, device: torch.device) -> torch.dtype:
        """The dtype in which directions and updates travel, where matrices are computed on `device`."""
        ...

    def direction(self, param: torch.Tensor, grad: torch.Tensor, group: Settings) -> torch.Tensor:
        """Update the states of these elements; what the matrix consists of. It is only read."""
        ...

    def of_matrix(self, matrix: torch.Tensor, group: Settings) -> torch.Tensor:
        """The function of a whole matrix (rows, columns), which it does not change; of the same shape."""
        ...

    def apply(self, param: torch.Tensor, update: torch.Tensor, matrix: tuple[int, int], group: Settings) -> None:
        """Change elements of a matrix of this shape by the elements of its update."""
        ...

    def work(self, matrix: tuple[int, int], group: Settings) -> float:
        """The time that `of_matrix` takes, in any unit: work is balanced over ranks by it."""
        ...

    def element_wise(self, param: torch.Tensor, grad: torch.Tensor, group: Settings) -> None:
        """Step elements of a tensor that has no matrices."""
        ...


class StatefulRule(MatrixRule, Protocol):
    """A rule with states of whole matrices. Its `of_matrix` is given them, fp32 by name, and changes them in place:
    `of_matrix(matrix, group, states)`. Where `feeds_back` is true, it returns two tensors of the matrix' shape.
    """

    feeds_back: bool

    def matrix_states(self, matrix: tuple[int, int], group: Settings) -> Mapping[str, tuple[int, ...]]:
        """The shapes of what is kept of a matrix of this shape, by name; none where nothing is kept."""
        ...

    def state_shapes(self, shape: Sequence[int], group: Settings) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the same for all matrices of a tensor together, one behind the other, as in `state`."""
        ...

    def initial_state(
        self, key: str, shape: tuple[int, ...], start: int, stop: int, group: Settings, device: torch.device
    ) -> torch.Tensor:
        """Elements [start, stop) of a matrix' state before its first step, 1-D."""
        ...

    def feed_back(self, param: torch.Tensor, result: torch.Tensor, group: Settings) -> None:
        """Change the states of elements by the second result."""
        ...


def stateful(rule: Any) -> StatefulRule | None:
    """The rule, if it may keep states of matrices or feed back."""
    return rule if hasattr(rule, "matrix_states") else None


def matrix_states(rule: Any, shape: Sequence[int], group: Settings) -> dict[str, MatrixState]:
    """The states of the matrices of a tensor of this shape, by name."""
    keeps = stateful(rule)
    if keeps is None or not (matrices := keeps.matrices(shape, group)):
        return {}
    whole = keeps.state_shapes(shape, group)
    each = [(rows * columns, keeps.matrix_states((rows, columns), group)) for rows, columns in matrices]
    return {key: MatrixState(whole[key], tuple((n, prod(of[key])) for n, of in each)) for key in whole}


def matrix_rule(optimizer: Any) -> MatrixRule | None:
    """The rule of an optimizer that can be stepped so; None for others, such as a subclass with a `step` of its own."""
    kinds = type(optimizer).__mro__
    if (base := next((kind for kind in kinds if "of_matrix" in vars(kind)), None)) is not None:
        return optimizer if has_step_of(optimizer, base) else None
    if isinstance(optimizer, torch.optim.Muon) and has_step_of(optimizer, torch.optim.Muon):
        return _TorchsMuon(optimizer)
    return None


def has_step_of(optimizer: Any, base: Any) -> bool:
    """Is `step` that of this class? Torch wraps it for hooks, in a subclass again."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)


class _TorchsMuon:
    """The rule of `torch.optim.Muon`, with the same operations in the same order."""

    def __init__(self, optimizer: torch.optim.Muon) -> None:
        self._optimizer = optimizer

    def matrices(self, shape: Sequence[int], group: Settings) -> Sequence[tuple[int, int]]:
        return () if 0 in shape else ((shape[0], shape[1]),)  # it refuses other tensors itself

    def message_dtype(self, group: Settings, device: torch.device) -> torch.dtype:
        return torch.bfloat16  # it rounds to this before anything else

    def direction(self, param: torch.Tensor, grad: torch.Tensor, group: Settings) -> torch.Tensor:
        state, momentum = self._optimizer.state[param], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def of_matrix(self, matrix: torch.Tensor, group: Settings) -> torch.Tensor:
        # torch's function would write to a matrix that is in bfloat16 already
        return newton_schulz_of_muon(matrix.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])

    def apply(self, param: torch.Tensor, update: torch.Tensor, matrix: tuple[int, int], group: Settings) -> None:
        lr = group["lr"].item() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-adjust_lr_of_muon(lr, group["adjust_lr_fn"], torch.Size(matrix)))

    def work(self, matrix: tuple[int, int], group: Settings) -> float:
        few, many = float(min(matrix)), float(max(matrix))
        return group["ns_steps"] * (4 * few * few * many + 2 * few**3)

    def element_wise(self, param: torch.Tensor, grad: torch.Tensor, group: Settings) -> None:
        raise TypeError("torch.optim.Muon has matrices only")
