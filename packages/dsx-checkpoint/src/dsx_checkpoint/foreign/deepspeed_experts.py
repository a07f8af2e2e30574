"""Masters and optimizer states of DeepSpeed's experts.

A rank numbers its own experts from 0. The files of weights have the numbers of the whole model, the optimizer states
those of the rank. With n experts per rank, expert-parallel rank e holds the experts e x n to (e + 1) x n - 1.

* Stage 0: `expp_rank_<e>_mp_rank_00_optim_states.pt` has all states of an optimizer, without names.
* Stages 1 and 2: flat rows in the files of all ranks, divided among the ranks that hold the same experts. These ranks
  depend on a setting that no file contains: they are every n-th rank, or neighbours. Both are tried, and the one that
  fits the weights is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .deepspeed_pieces import fragments_by_mapping, joined, states_by_name, states_of, tensors_under
from .deepspeed_stage0 import Unnamed, read_unnamed
from .source import Source, Tensor
from .unpickling import read_file

logger = logging.getLogger("dsx.checkpoint")

__all__ = ["ExpertNames", "add_expert_states", "same_values"]

_EXPERT = re.compile(r"(?P<layer>.*\.)(?P<list>deepspeed_experts\.)(?P<number>\d+)(?P<rest>\..+)")


class Part(Protocol):
    """The tensors that the data-parallel ranks of one model-parallel rank hold together (`deepspeed.py`)."""

    parameters: dict[str, Tensor]
    optim: list[Any]
    shared: list[tuple[str, str]]


@dataclass(frozen=True)
class ExpertNames:
    """The experts' parameters by their names in the whole model, and the number of ranks that they are divided
    among.
    """

    whole: tuple[str, ...]
    ranks: int

    @staticmethod
    def is_one(name: str) -> bool:
        """Whether this is a parameter of an expert."""
        return _EXPERT.fullmatch(name) is not None

    @staticmethod
    def layer(name: str) -> str:
        """The part of a name before the list of experts."""
        return _matched(name)["layer"]

    @staticmethod
    def number(name: str) -> int:
        """The expert's number in a name."""
        return int(_matched(name)["number"])

    def per_rank(self, layer: str) -> int:
        """Experts of a layer on each rank."""
        numbers = {int(found["number"]) for found in map(_matched, self.whole) if found["layer"] == layer}
        return max(1, len(numbers) // self.ranks)

    def on_rank(self, name: str, rank: int) -> str:
        """The name in the whole model of the parameter that a rank calls `name`."""
        found = _matched(name)
        number = int(found["number"]) + rank * self.per_rank(found["layer"])
        return f"{found['layer']}{found['list']}{number}{found['rest']}"

    def held_by(self, rank: int) -> list[str]:
        """Names in the whole model of a rank's experts, in the order of the model."""
        return [name for name in self.whole if self._owner(name) == rank]

    def _owner(self, name: str) -> int:
        found = _matched(name)
        return int(found["number"]) // self.per_rank(found["layer"])

    def beside(self, others: Sequence[str], rank: int) -> list[str]:
        """All names of a rank in the order of its model: experts come after the gate of their layer."""
        names = list(others)
        for name in reversed(self.held_by(rank)):
            inside = _matched(name)["layer"].removesuffix("experts.")
            before = [place for place, other in enumerate(names) if other.startswith(f"{inside}gate.")]
            names.insert(before[-1] + 1 if before else len(names), name)
        return names


def _matched(name: str) -> re.Match[str]:
    found = _EXPERT.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no parameter of an expert")
    return found


def layouts(ranks: int, experts: int) -> Iterator[Callable[[int], int]]:
    """The possible divisions of experts: functions from a data-parallel rank to its expert-parallel rank."""
    yield lambda rank: rank % experts
    if 1 < experts < ranks:
        yield lambda rank: rank // (ranks // experts)


def same_values(masters: Mapping[str, Tensor], parameters: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Whether the masters of `names` are the parameters, in the parameters' dtype."""
    for name in names:
        if name not in masters:
            return False
        value: Any = masters[name].fetch().to(parameters[name].dtype)
        if not torch.equal(value, parameters[name].fetch()):
            return False
    return True


# - Reading them


def add_expert_states(source: Source, parts: Sequence[Part], files: list[Path]) -> None:
    """Masters and states of experts, where the files tell which is which."""
    whole = tuple(name for name in source.parameters if ExpertNames.is_one(name))
    if not whole or len(parts) > 1:
        return
    known = files and _expert_states_without_names(source, parts[0], whole, files)
    known = known or (parts[0].optim and _expert_states_of_rows(source, parts[0], whole))
    if not known:
        logger.warning("import: the optimizer's states of experts cannot be told apart; they start from zero")


def _expert_states_without_names(source: Source, part: Part, whole: tuple[str, ...], files: list[Path]) -> bool:
    """Stage 0: one file per rank that holds other experts. The first one has the states of all other parameters."""
    experts, shared = ExpertNames(_in_model_order(whole), len(files)), {name for name, _ in part.shared}
    others = [name for name in part.parameters if name not in shared]
    found: list[Unnamed] = []
    for rank, path in enumerate(files):
        names = experts.beside(others, rank)
        one = read_unnamed(read_file(path).get("optimizer"), names, source.parameters, whole)
        if one is None:
            return False
        found.append(one)
    for one in reversed(found):
        source.masters.update(one.masters)
        source.states.update(one.states)
    return True


def _in_model_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Layers as they come, in each the experts by number."""
    layers = {name: number for number, name in enumerate(dict.fromkeys(map(ExpertNames.layer, names)))}
    return tuple(sorted(names, key=lambda name: (layers[ExpertNames.layer(name)], ExpertNames.number(name))))


def _expert_states_of_rows(source: Source, part: Part, whole: tuple[str, ...]) -> bool:
    """Stages 1 and 2: rows cut over the ranks that hold the same experts."""
    flats = [tensors_under(sd, "single_partition_of_fp32_groups") for sd in part.optim]
    states = [states_of(sd.get("base_optimizer_state")) for sd in part.optim]
    mappings = [sd.get("param_slice_mappings") for sd in part.optim]
    if not all(mappings):
        return False
    local = {name for mapping in mappings for group in mapping for name in group if ExpertNames.is_one(name)}
    if not local or len(whole) % len(local):
        return False
    experts, ranks = ExpertNames(_in_model_order(whole), len(whole) // len(local)), len(flats)
    for number_of in layouts(ranks, experts.ranks):
        masters: dict[str, Tensor] = {}
        keyed: dict[str, dict[str, Any]] = {}
        for group in range(min(len(flat) for flat in flats)):
            rows = [flat[group] for flat in flats]
            values = states_by_name([s.get(group, {}) for s in states], [row.numel() for row in rows])
            for number in range(experts.ranks):
                mine = [mapping[group] if number_of(rank) == number else {} for rank, mapping in enumerate(mappings)]
                for name, where in fragments_by_mapping(mine).items():
                    if not ExpertNames.is_one(name):
                        continue
                    name = experts.on_rank(name, number)
                    shape = source.parameters[name].shape
                    masters[name] = joined(name, shape, rows, where, padding=None)
                    keyed[name] = {
                        key: joined(name, shape, value, where, padding=None) if isinstance(value, list) else value
                        for key, value in values.items()
                    }
        if same_values(masters, source.parameters, whole):
            source.masters.update(masters)
            source.states.update(keyed)
            return True
    return False
