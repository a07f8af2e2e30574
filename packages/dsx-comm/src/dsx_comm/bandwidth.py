"""Bandwidth of a call from its message size S, its latency t and its group size n: pure arithmetic.

Algorithm bandwidth is useful bytes by time; bus bandwidth is what the links carried, comparable with the hardware's
number whatever n is (the convention of nccl-tests). S here is what the log calls message size: the tensor of this rank.
n is the size of the group that communicated, not of the world.

    all_to_all(_single)                      S/t                 S/t (n-1)/n
    all_gather*, reduce_scatter*             n S/t               n S/t (n-1)/n
    all_reduce, all_reduce_coalesced, ...    2 S/t               S/t 2(n-1)/n
    everything else                          S/t                 S/t

Compressed and quantised operations count as the uncompressed operation, with S before compression: the result is the
bandwidth that the uncompressed one would need to take the same time.
"""

from __future__ import annotations


def gbps(op: str, nbytes: int, latency_ms: float, size: int) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in Gbit/s; (0, 0) for a latency of 0.

    Operations the table does not know are treated as "everything else".
    """
    if latency_ms <= 0:
        return 0.0, 0.0
    op = op.removeprefix("compressed_").removeprefix("quantized_")
    rate = nbytes * 8 / latency_ms / 1e6
    share = (size - 1) / size
    if op.startswith("all_to_all"):
        return rate, rate * share
    if op.startswith(("all_gather", "reduce_scatter")):
        return rate * size, rate * size * share
    if op in ("all_reduce", "all_reduce_coalesced", "inference_all_reduce"):
        return 2 * rate, 2 * rate * share
    return rate, rate


def trimmed_mean(values: list[float], cut: float = 0.1) -> float:
    """Mean without the lowest and highest `cut` of the values (rounded down); 0 without values."""
    drop = int(len(values) * cut)
    kept = sorted(values)[drop : len(values) - drop]
    return sum(kept) / len(kept) if kept else 0.0


def size_text(nbytes: int) -> str:
    """ "1.5 MB" with 1024-byte steps."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024 or unit == "GB":
            return f"{value:.4g} {unit}"
        value /= 1024
    return ""
