"""Micro-batches for the first and the last stage: read from an iterator, or split from one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import PipelineError
from .structure import describe, flatten, unflatten


class DataError(PipelineError):
    """The data of a step ended, cannot be divided, or is not a pair of inputs and labels."""


class MicroBatches:
    """The micro-batches of one step, read in order and on demand.

    Args:
        source: iterator over (inputs, labels), or over what `batch_fn` takes; None on ranks that need no data.
        count: number of micro-batches of the step.
        device: where tensors go.
        batch_fn: makes (inputs, labels) of an item; None: the items are such pairs.
        equal_rows: refuse micro-batches with other numbers of rows than the first one.
    """

    def __init__(
        self,
        source: Iterator[Any] | None,
        count: int,
        device: torch.device,
        batch_fn: Callable[[Any], Any] | None,
        *,
        equal_rows: bool = False,
    ) -> None:
        self._source, self._count, self._device, self._batch_fn = source, count, device, batch_fn
        self._equal_rows = equal_rows
        self._read: list[tuple[Any, Any]] = []

    def get(self, micro_batch: int) -> tuple[Any, Any]:
        """(inputs, labels) of a micro-batch, on the device.

        Raises:
            DataError: there is no iterator, it has ended, an item is not a pair, or with `equal_rows` its rows are
                more or fewer than those of the first one.
        """
        while len(self._read) <= micro_batch:
            pair = self._next(len(self._read))
            if self._equal_rows and self._read:
                _check_rows(len(self._read), pair, self._read[0])
            self._read.append(pair)
        return self._read[micro_batch]

    def _next(self, index: int) -> tuple[Any, Any]:
        if self._source is None:
            raise DataError("this rank holds the first or the last stage and has no data iterator")
        if not hasattr(self._source, "__next__"):
            raise DataError(
                f"the data iterator is a {type(self._source).__name__}, expected an iterator over micro-batches: pass "
                "iter(...) of it, made once and not for every step"
            )
        try:
            item = next(self._source)
        except StopIteration:
            raise DataError(
                f"the data iterator ended: got {index} micro-batches, expected {self._count} for a step; drop the "
                "incomplete step, or wrap the loader in dsx.RepeatingLoader"
            ) from None
        if self._batch_fn is not None:
            item = self._batch_fn(item)
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"the data iterator gave {describe(item)}, expected (inputs, labels); use batch_fn")
        inputs, labels = (self._placed(part) for part in item)
        return inputs, labels

    def _placed(self, value: Any) -> Any:
        structure, tensors, others = flatten(value)
        return unflatten(structure, [_moved(t, self._device) for t in tensors], others)


def _check_rows(index: int, pair: tuple[Any, Any], first: tuple[Any, Any]) -> None:
    """Refuse a pair (inputs, labels) with other rows than the first one: in the mean of the losses its rows would weigh
    more or less than those of the others, and gradients be those of another batch (test_unequal_micro_batches).
    """
    for name, part, expected in zip(("inputs", "labels"), pair, first):
        got, before = _rows(part), _rows(expected)
        if got != before:
            raise DataError(
                f"micro-batch {index} has {got} rows of {name}, expected {before} as the first one of this step: each "
                "micro-batch has the same weight in the loss, so the rows of a smaller one would count more; drop the "
                "incomplete batch (drop_last=True of a loader), or pass dynamic_shape=True if equal weights are meant"
            )


def _rows(value: Any) -> int | None:
    """Size of the first dimension of the first tensor that has one; None: there is no such tensor."""
    return next((tensor.shape[0] for tensor in flatten(value)[1] if tensor.dim()), None)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. For CUDA, host memory is copied to locked memory first: then the host does not wait
    for the device, and the caller may write to the tensor again.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device)
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def split_batch(inputs: Any, labels: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Split a batch along the first dimension of all its tensors into `count` micro-batches of equal size.

    Raises:
        DataError: the number of rows of a tensor is not a multiple of the micro-batches. Every micro-batch has the same
            weight, so the rows of a smaller one would count more.
    """
    pieces = [_split(part, count) for part in (inputs, labels)]
    yield from zip(*pieces)


def _split(value: Any, count: int) -> list[Any]:
    structure, tensors, others = flatten(value)
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] < count or tensor.shape[0] % count:
            raise DataError(
                f"a batch of shape {list(tensor.shape)} cannot be split into {count} equal micro-batches along its "
                "first dimension; drop the incomplete batch (drop_last=True of a loader), or pass micro-batches to "
                "train_batch of a pipeline with dynamic_shape=True, where each has the same weight whatever its size"
            )
    rows = [tensor.chunk(count) for tensor in tensors]
    return [unflatten(structure, [row[i] for row in rows], others) for i in range(count)]
