"""Sequence-parallel regions of a sliced model, found by rules.

Between the sliced layers of a block each rank needs only a part of the tokens: norms, residual sums and dropout work on
single tokens. So the hidden state is split along the sequence before the blocks, gathered before each module
with column-parallel layers, reduced and scattered by its row-parallel layer, and gathered after the blocks:

    first block's input   scatter        (backward: all-gather)
    attention, mlp        gather         (backward: reduce-scatter)
    row-parallel layer    reduce-scatter (backward: all-gather)
    last block's output   gather         (backward: own piece)

The activations between the sliced layers then take 1 / ranks of the memory, for the same number of bytes sent. The
modules around the blocks (embeddings, final norm, head) see the whole sequence, so a model's own masks and positions
stay right, and so do the messages between pipeline stages.

The gathering is a hook on the modules, not a part of the layers, because a model's attention takes shapes from
its input. Left out: cross-attention, and hidden states whose sequence is not dimension 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import TensorSliceError
from .regions import gather_from_sequence, gather_sequence, scatter_sequence, sum_gradients_over_slices

_DIM = 1  # [batch, sequence, hidden]


class _GroupHooks:
    """Base of hooks with a process group. Copies of a module share the group, because it cannot be copied."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self)(self.group)
        made.__dict__.update(self.__dict__)
        return made


class _GatherInput(_GroupHooks):
    """Forward pre-hook that gathers the whole sequence for the module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_hidden(module, args, kwargs, lambda hidden: gather_sequence(hidden, _DIM, self.group))


class BlockBorder(_GroupHooks):
    """Hooks of one block.

    Attributes:
        is_first: the block is the first of a row of blocks on this rank, so it splits the sequence.
        is_last: the block is the last of a row of blocks on this rank, so it gathers the sequence.
    """

    is_first = is_last = False

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook: split the sequence if the block is the first."""
        if not self.is_first:
            return None
        return _with_hidden(module, args, kwargs, lambda hidden: scatter_sequence(hidden, _DIM, self.group))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: gather the sequence if the block is the last."""
        if not self.is_last:
            return None
        if isinstance(output, tuple):
            return (gather_from_sequence(output[0], _DIM, self.group), *output[1:])
        return gather_from_sequence(output, _DIM, self.group)


def add_sequence_regions(blocks: nn.ModuleList, sliced: Iterable[nn.Module], group: Any) -> None:
    """Make the inside of blocks sequence-parallel.

    Args:
        blocks: the blocks, each of which runs on the output of the previous one.
        sliced: the sliced layers in them, built for pieces of the sequence (`input_is_gathered`, `sequence_parallel`).
        group: process group of the ranks that share the slices.
    """
    layers = {id(layer) for layer in sliced}
    for block in blocks:
        for module in list(block.modules()):
            if id(module) in layers:
                continue
            if any(getattr(child, "input_is_gathered", False) for child in module.children()):
                module.register_forward_pre_hook(_GatherInput(group), with_kwargs=True)
            sum_gradients_over_slices(module, group, recurse=False)
        border = BlockBorder(group)
        block.register_forward_pre_hook(border.enter, with_kwargs=True)
        block.register_forward_hook(border.leave)
    set_borders(blocks)


def set_borders(blocks: Iterable[nn.Module]) -> None:
    """Set which blocks split and gather the sequence: the first and the last of every row of blocks.

    `blocks` are in the order in which they run. A module without sequence-parallel regions ends a row: it replaces a
    block of another pipeline stage.
    """
    before: BlockBorder | None = None
    for block in blocks:
        border = _border_of(block)
        if border is not None:
            border.is_first, border.is_last = before is None, True
            if before is not None:
                before.is_last = False
        before = border


def _border_of(block: nn.Module) -> BlockBorder | None:
    for hook in block._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, BlockBorder):
            return owner
    return None


def _with_hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """Apply `change` to the hidden state: the first argument, or the argument `hidden_states`."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    raise TensorSliceError(
        f"sequence_parallel: {type(module).__name__} was called without a hidden state as its first argument, or as "
        "hidden_states="
    )
