"""Weights that several stages share.

Each rank that uses a shared weight holds a copy. The copies start equal (the lowest rank's values are sent to the
others) and stay equal, because each step sums their gradients over the ranks before the optimizer uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dsx_comm
import torch
from torch import nn

from .errors import PipelineError
from .grid import RankGrid
from .layers import TiedLayerSpec, parameter_at


@dataclass(frozen=True)
class Tie:
    """One shared weight on this rank.

    Attributes:
        key: name of what is shared.
        name: name of the parameter on this rank.
        parameter: this rank's copy.
        group: process group of the ranks that hold a copy.
        ranks: global ranks of this group; only the copy of the first one counts in norms and checkpoints.
    """

    key: str
    name: str
    parameter: nn.Parameter
    group: Any
    ranks: tuple[int, ...]

    @property
    def owned(self) -> bool:
        """True on the rank whose copy counts in norms and checkpoints."""
        return dsx_comm.get_rank() == self.ranks[0]


class Ties:
    """All shared weights of one rank, in an order that all ranks agree on."""

    def __init__(self, ties: Sequence[Tie]) -> None:
        self.ties = tuple(ties)

    def __bool__(self) -> bool:
        return bool(self.ties)

    def synchronize(self) -> None:
        """Set every copy to the values of the first rank's copy (collective)."""
        for tie in self.ties:
            with torch.no_grad():
                value = tie.parameter.detach().contiguous()
                dsx_comm.broadcast(value, src=tie.ranks[0], group=tie.group)
                tie.parameter.copy_(value)

    def prepare_gradients(self) -> list[torch.Tensor]:
        """Make every copy's gradient one that can be summed, and return them: a copy without a gradient gets zeros.

        Raises:
            PipelineError: a gradient is sparse.
        """
        prepared = []
        for tie in self.ties:
            gradient = tie.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(tie.parameter)
            if gradient.layout is not torch.strided:
                raise PipelineError(
                    f"{tie.name}: got a gradient of layout {gradient.layout}, expected a dense one: the gradients of a"
                    " weight that stages share are added up over the stages; build the layer with sparse=False"
                )
            tie.parameter.grad = gradient = gradient.contiguous()
            prepared.append(gradient)
        return prepared

    def reduce_gradients(self) -> None:
        """Sum the gradients of all copies; a copy without a gradient counts as zeros (collective over the copies).

        Raises:
            PipelineError: see `prepare_gradients`.
        """
        for tie, gradient in zip(self.ties, self.prepare_gradients()):
            dsx_comm.all_reduce(gradient, op=dsx_comm.ReduceOp.SUM, group=tie.group)


def _make_groups(holders: dict[str, list[list[int]]]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Make the groups of ranks that share each weight. Every rank of the world calls it with the same argument.

    Args:
        holders: for every key, one list of global ranks per pipeline (copy of the model).

    Returns:
        For every key that this rank shares with others: the group and its ranks.
    """
    me = dsx_comm.get_rank()
    made: dict[tuple[int, ...], Any] = {}
    found = {}
    for key in sorted(holders):
        for ranks in map(tuple, holders[key]):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dsx_comm.new_group(list(ranks), description="tied weights")
            if len(ranks) > 1 and me in ranks:
                found[key] = (made[ranks], ranks)
    return found


def find_ties(module: nn.Module, specs: Sequence[Any], place: dict[int, int], grid: RankGrid) -> list[Tie]:
    """The weights that this rank shares with others (collective).

    Args:
        module: the `PipelineModule`, with the layers of this rank.
        specs: all layers.
        place: index of a layer -> index in the pipeline of the rank that holds it.
        grid: the ranks.
    """
    shared = _shared_weights(module, specs, place)
    pipelines = grid.topology.get_axis_comm_lists("pipe") or [[grid.global_rank]]
    groups = _make_groups(
        {key: [sorted({p[r] for r in ranks}) for p in pipelines] for key, (ranks, _) in shared.items()}
    )
    return [
        Tie(key, name, parameter, *groups[key])
        for key, (_, found) in sorted(shared.items()) if key in groups for name, parameter in found
    ]  # fmt: skip


_Shared = dict[str, tuple[set[int], list[tuple[str, nn.Parameter]]]]
"""Shared weight -> (indices of the pipeline ranks that use it, its (name, parameter) on this rank)."""


def _shared_weights(module: nn.Module, specs: Sequence[Any], place: dict[int, int]) -> _Shared:
    found: _Shared = {}
    built: Any = module.get_submodule("tied_modules")
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            entry = found.setdefault(spec.key, (set(), []))
            entry[0].add(place[index])
            if spec.key in built and not entry[1]:
                alike = [other for other in specs if isinstance(other, TiedLayerSpec) and other.key == spec.key]
                entry[1].extend(_tied_parameters(built[spec.key], spec, alike))
    users: dict[int, list[tuple[int, str]]] = {}
    for index, spec in enumerate(specs):
        if isinstance(spec, nn.Module):  # built modules that share a parameter, as in a tied nn.Sequential
            for name, parameter in spec.named_parameters():
                users.setdefault(id(parameter), []).append((index, name))
    mine = {id(p): (n, p) for n, p in module.named_parameters()}
    for ident, uses in users.items():
        ranks = {place[i] for i, _ in uses}
        if len(ranks) > 1:
            index, name = uses[0]
            found[f"{index:06d}.{name}"] = (ranks, [mine[ident]] if ident in mine else [])
    return found


def _tied_parameters(
    module: nn.Module, spec: TiedLayerSpec, specs: Sequence[TiedLayerSpec]
) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what the layers of one key share: all parameters if they are built alike, else those that
    the first one names.

    Raises:
        PipelineError: there is no parameter of such a name.
    """
    named = [(path, parameter_at(module, path)) for path in spec.tied_weight_attr]
    if len({(other.typename, repr(other)) for other in specs}) == 1:
        named = list(module.named_parameters())
    return [(f"tied_modules.{spec.key}.{name}", parameter) for name, parameter in named]
