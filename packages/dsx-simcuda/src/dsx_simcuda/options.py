"""The switches of the simulated device: what they mean, and how the environment sets them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

MODES = ("eager", "random", "lazy", "slow-side", "slow-default")
"""When streams run: at once; after random delays; only when something waits; side or default streams late."""

VARIABLES = {
    "mode": "DSX_SIMCUDA_MODE",
    "seed": "DSX_SIMCUDA_SEED",
    "devices": "DSX_SIMCUDA_DEVICES",
    "memory_mib": "DSX_SIMCUDA_MIB",
    "delay_us": "DSX_SIMCUDA_DELAY_US",
    "cap_ms": "DSX_SIMCUDA_CAP_MS",
    "gbps": "DSX_SIMCUDA_GBPS",
    "races": "DSX_SIMCUDA_RACES",
    "poison": "DSX_SIMCUDA_POISON",
    "hang_s": "DSX_SIMCUDA_HANG_S",
    "one_collective": "DSX_SIMCUDA_ONE_COLLECTIVE",
    "strict_free": "DSX_SIMCUDA_STRICT_FREE",
}
FIXED = ("seed", "devices", "memory_mib")  # known when the first stream or device is used


@dataclass(frozen=True)
class Options:
    """The switches. `mode` is a name of `MODES` or its number.

    `seed` chooses the delays of the mode "random". `devices` per process are 8 at most, each with `memory_mib`.
    `delay_us` is the delay of the modes "random" and "slow-...", and `cap_ms` how long the mode "lazy" leaves work
    alone. `gbps` is the pace of copies between host and device (0: as fast as they go). `races`: 0 finds none, 1 those
    of two operations, 2 also memory that is handed out again while another stream may use it. `poison` fills fresh
    memory with NaN. A stream that does not finish in `hang_s` seconds ends the program with exit status 99.
    `one_collective` lets only one collective or message at a time run on a device, and reports collectives of two
    communicators that are not ordered. `strict_free` also reports memory that is freed while the use on another stream
    is not ordered before (CUDA allows it).
    """

    mode: str | int = "random"
    seed: int = 0
    devices: int = 1
    memory_mib: int = 2048
    delay_us: float = 300.0
    cap_ms: float = 30.0
    gbps: float = 0.0
    races: int = 2
    poison: bool = True
    hang_s: float = 60.0
    one_collective: bool = False
    strict_free: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("devices", 1, 8), ("memory_mib", 32, 1 << 20), ("races", 0, 2)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}: got {value}, expected {low} to {high}")
        for name in ("delay_us", "cap_ms", "gbps", "hang_s", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more")
        mode_number(self.mode)

    @classmethod
    def from_environment(cls, **given: object) -> Options:
        """The defaults, changed by the environment (`DSX_SIMCUDA_MODE` ...), changed by what is given.

        Raises `ValueError` where a variable or a value is none of the allowed ones.
        """
        known = {field.name: field.default for field in fields(cls)}
        values: dict[str, object] = {}
        for name, variable in VARIABLES.items():
            text = os.environ.get(variable)
            if text:
                values[name] = _read(variable, text, known[name])
        unknown = set(given) - set(known)
        if unknown:
            raise ValueError(f"unknown option {sorted(unknown)[0]!r}; expected one of {', '.join(known)}")
        values.update({name: value for name, value in given.items() if value is not None})
        return replace(cls(), **values)  # type: ignore[arg-type]


def _read(variable: str, text: str, default: object) -> object:
    """The value of a variable in the type of the option's default."""
    if isinstance(default, str):
        return int(text) if text.isdigit() else text
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{variable}: got {text!r}, expected a number") from None
    return type(default)(number)  # type: ignore[call-arg]


def mode_number(mode: str | int) -> int:
    """The number of a mode. Raises `ValueError` for one that does not exist."""
    if isinstance(mode, int) and not isinstance(mode, bool) and 0 <= mode < len(MODES):
        return mode
    if mode in MODES:
        return MODES.index(mode)  # type: ignore[arg-type]
    raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}, or its number")
