"""Dividing a list of layers over stages.

`partition_uniform` and `partition_balanced` give exactly the splits of DeepSpeed, because splits are visible to users
and in their checkpoints. `partition_balanced` minimises the difference between the largest and the smallest part.
`split_by_weights` minimises the largest part, which determines the length of a step. The partition method "time" and
the planner use it.

All functions return the bounds of the parts: part i is [bounds[i], bounds[i + 1]).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

from .errors import PartitionError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Equal numbers of items; the first `num_items % num_parts` parts have one more.

        partition_uniform(10, 4)      # [0, 3, 6, 8, 10]

    If there are no more items than parts, every item is a part of its own and the last parts are empty.
    """
    _check_num_parts(num_parts)
    if num_items <= num_parts:
        return [min(i, num_items) for i in range(num_parts + 1)]
    chunk, rest = divmod(num_items, num_parts)
    return [i * chunk + min(i, rest) for i in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Contiguous, non-empty parts with little difference between the heaviest and the lightest one.

        partition_balanced([1, 1, 1, 1, 5, 1, 1, 1], 4)      # [0, 2, 4, 5, 8]

    Dynamic programming over prefixes: the best division of each prefix is extended by one part. Among equally good
    divisions the one whose last part begins latest is taken. If there are no more items than parts, the result is that
    of `partition_uniform`.
    """
    _check_num_parts(num_parts)
    n = len(weights)
    if n <= num_parts:
        return partition_uniform(n, num_parts)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    # best[k][j]: (difference, largest, smallest, start of the last part) of the first j items in k parts
    rows: list[dict[int, tuple[float, float, float, int]]] = [{j: (0.0, sums[j], sums[j], 0) for j in range(1, n + 1)}]
    for parts in range(2, num_parts + 1):
        row: dict[int, tuple[float, float, float, int]] = {}
        for j in range(parts, n + 1):
            for start in range(parts - 1, j):
                _, high, low, _ = rows[-1][start]
                last = sums[j] - sums[start]
                high, low = max(high, last), min(low, last)
                if j not in row or high - low <= row[j][0]:
                    row[j] = (high - low, high, low, start)
        rows.append(row)
    bounds = [n]
    for row in reversed(rows):
        bounds.append(row[bounds[-1]][3])
    return bounds[::-1]


def split_by_weights(weights: Sequence[float], num_parts: int) -> list[int]:
    """Contiguous, non-empty parts whose largest weight is as small as possible.

    The remaining items are divided by the same rule after each part is fixed. The sum of squares breaks ties, so equal
    largest parts give the more even division.

    Raises:
        PartitionError: there are fewer items than parts.
    """
    _check_num_parts(num_parts)
    n = len(weights)
    if n < num_parts:
        raise PartitionError(f"got {n} layers for {num_parts} stages, expected at least one layer per stage")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(start: int, parts: int) -> tuple[tuple[float, float], int]:
        """((largest part, sum of squares), end of the first part) for the items from `start` on."""
        if parts == 1:
            last = sums[n] - sums[start]
            return (last, last * last), n
        found: tuple[tuple[float, float], int] | None = None
        for end in range(start + 1, n - parts + 2):
            part = sums[end] - sums[start]
            (largest, squares), _ = best(end, parts - 1)
            key = (max(part, largest), part * part + squares)
            if found is None or key < found[0]:
                found = (key, end)
        if found is None:
            raise PartitionError(f"{n} layers cannot be divided into {num_parts} parts")
        return found

    bounds = [0]
    for parts in range(num_parts, 0, -1):
        bounds.append(best(bounds[-1], parts)[1])
    return bounds


def bounds_of(
    method: str,
    num_parts: int,
    names: Sequence[str],
    parameters: Callable[[], Sequence[int]],
    seconds: Callable[[], Sequence[float]] | None = None,
) -> list[int]:
    """The bounds of the parts under a partition method.

    Args:
        method: uniform, parameters (or best), type:<regex> or time (or profile), in upper or lower case. The regex is
            searched in the layers' class names, without regard to case.
        num_parts: number of stages.
        names: class name of every layer.
        parameters: returns the number of trainable elements of every layer.
        seconds: returns the measured seconds of every layer, for `time`.

    Raises:
        PartitionError: the method is unknown, `time` has no measured times, no layer matches the regex, or there are
            fewer layers than stages.
    """
    if len(names) < num_parts:
        raise PartitionError(
            f"got {len(names)} layers for {num_parts} stages, expected at least one layer per stage; "
            f"use num_stages={len(names)} or fewer"
        )
    kind, _, pattern = method.partition(":")
    kind = kind.strip().lower()
    if kind == "uniform":
        return partition_uniform(len(names), num_parts)
    if kind in ("parameters", "best"):
        return partition_balanced(list(parameters()), num_parts)
    if kind == "type":
        return partition_balanced(_weights_by_match(pattern, names), num_parts)
    if kind in ("time", "profile"):
        if seconds is None:
            raise PartitionError(
                f"partition_method={method!r} needs measured times: pass layer_times=dsx_pipe.measure_layers(...)"
            )
        return split_by_weights(list(seconds()), num_parts)
    raise PartitionError(
        f"partition_method: got {method!r}, expected 'uniform', 'parameters', 'type:<regex of class names>' or 'time'"
    )


def _weights_by_match(pattern: str, names: Sequence[str]) -> list[int]:
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(f"partition_method: {pattern!r} is not a regular expression ({error})") from None
    weights = [1 if regex.search(name) else 0 for name in names]
    if not any(weights):
        raise PartitionError(
            f"partition_method: no layer's class matches {pattern!r}; classes are {sorted(set(names))}"
        )
    return weights


def _check_num_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise PartitionError(f"number of parts: got {num_parts}, expected at least 1")
