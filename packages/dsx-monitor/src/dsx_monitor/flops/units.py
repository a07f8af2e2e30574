"""Numbers as people read them: decimal prefixes, two decimals.

`flops_to_string` uses the unit FLOPS for counts and rates, as existing scripts do. A profile shows both, so its counts
are in flops (`count_to_string`) and its rates in FLOPS.
"""

from __future__ import annotations

__all__ = [
    "bytes_to_string",
    "count_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_SIZE = {prefix: size for size, prefix in _PREFIXES}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """`1381632` as "1.38 M". `units` is the prefix to use; None chooses one by the size of the number."""
    if units is None:
        units = next((prefix for size, prefix in _PREFIXES if abs(num) >= size), "") if num else ""
    if units not in _SIZE:
        raise ValueError(f"number_to_string(units=...): got {units!r}, expected one of {', '.join(map(repr, _SIZE))}")
    return f"{num / _SIZE[units]:.{precision}f} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """The number with the unit FLOPS (operations, or operations per second)."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def count_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """A number of operations, with the unit flops."""
    return f"{number_to_string(flops, units, precision)}flops"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """The number with the unit MACs (multiply-accumulates)."""
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters."""
    return number_to_string(params_num, units, precision).rstrip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds as s, ms or us."""
    if units is None:
        units = "" if duration >= 1 or duration == 0 else "m" if duration >= 1e-3 else "u"
    return f"{number_to_string(duration, units, precision)}s"


def bytes_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """The number with the unit B, decimal prefixes."""
    return f"{number_to_string(num, units, precision)}B"
