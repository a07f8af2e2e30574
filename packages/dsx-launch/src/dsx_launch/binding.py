"""The CPU cores that each local rank is pinned to (``--bind_cores_to_rank``, ``--bind_core_list``). The worker process
does the pinning.

Ranks are kept on one NUMA node where the shares allow it: threads of a rank inherit its cores, and Linux puts a page on
the node of the thread that touches it first. So memory for offload, locked or not, and the threads that step it lie on
one node. Left out: which node a GPU is nearest to; there ``--bind_core_list`` says the order of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import ResourceError
from .resources import MOST_SLOTS

NODES = Path("/sys/devices/system/node")


def parse_core_list(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` -> ``(0, 1, 2, 3, 8)``. Raises `ResourceError` for bad ranges and cores listed twice."""
    cores: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ResourceError(
                f"--bind_core_list {text!r}: got {part.strip()!r}, expected a core or a range such as 0-3,8"
            )
        first, last = (_core(number, text) for number in (low, high or low))
        if last < first:
            raise ResourceError(f"--bind_core_list {text!r}: range {part.strip()} runs backwards; write {last}-{first}")
        cores.extend(range(first, last + 1))
    if len(set(cores)) != len(cores):
        raise ResourceError(f"--bind_core_list {text!r}: a core is listed twice")
    return tuple(cores)


def _core(number: str, text: str) -> int:
    """A core's number. It is checked before a range is expanded, because a typing error could make a range that fills
    the memory.
    """
    if len(number) > len(str(MOST_SLOTS)) or int(number) > MOST_SLOTS:
        shown = number if len(number) <= 20 else f"{number[:17]}..."
        raise ResourceError(f"--bind_core_list {text[:80]!r}: got core {shown}, expected at most {MOST_SLOTS}")
    return int(number)


def split_cores(cores: Sequence[int], processes: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive equal shares of ``cores`` for ``processes`` local ranks; remaining cores are not used.

    Raises `ResourceError` if there are fewer cores than processes.
    """
    share = len(cores) // processes
    if share == 0:
        raise ResourceError(
            f"--bind_cores_to_rank: {processes} processes, but only {len(cores)} core(s): {','.join(map(str, cores))};"
            " start fewer processes or list more cores"
        )
    return tuple(tuple(cores[rank * share : (rank + 1) * share]) for rank in range(processes))


def node_cores(cores: Iterable[int], folder: Path = NODES) -> list[tuple[int, ...]]:
    """``cores`` by NUMA node, each node in ascending order; one node where the system does not say."""
    left, found = set(cores), list[tuple[int, ...]]()
    for path in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        listed = path.read_text().strip()
        here = tuple(sorted(left.intersection(parse_core_list(listed)))) if listed else ()
        left.difference_update(here)
        found += [here] if here else []
    return [*found, tuple(sorted(left))] if left or not found else found


def share_nodes(nodes: Sequence[Sequence[int]], processes: int) -> tuple[tuple[int, ...], ...]:
    """Equal shares of the nodes' cores for ``processes`` local ranks, in order. No share lies on two nodes, if that
    costs no rank its core: with a multiple of the nodes each gets as many ranks, else the cores are cut node by node.

    Raises `ResourceError` if there are fewer cores than processes.
    """
    each, rest = divmod(processes, len(nodes))
    share = min(len(node) for node in nodes) // each if each and not rest else 0
    if not share:
        return split_cores([core for node in nodes for core in node], processes)
    return tuple(tuple(node[rank * share : (rank + 1) * share]) for node in nodes for rank in range(each))


def cores_for(procs: int, *, bind: bool, core_list: str) -> tuple[tuple[int, ...], ...]:
    """The cores of each local rank on this host; empty if ranks are not bound."""
    if not bind and not core_list:
        return ()
    if not hasattr(os, "sched_setaffinity"):
        raise ResourceError(
            "--bind_cores_to_rank needs an operating system that can pin processes to cores (Linux); leave it out"
        )
    here = os.sched_getaffinity(0)
    if not core_list:
        return share_nodes(node_cores(here), procs)
    cores = parse_core_list(core_list)
    missing = [core for core in cores if core not in here]
    if missing:
        raise ResourceError(
            f"--bind_core_list {core_list!r}: core {missing[0]} is not available here; available: {sorted(here)}"
        )
    return split_cores(cores, procs)
