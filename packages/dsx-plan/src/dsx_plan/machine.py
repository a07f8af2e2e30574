"""The machine of a job: facts from data sheets, and a few constants that say how much of them is reached.

Facts are given or looked up; constants are measured (`calibrate`) or fitted. `Machine.named("H100-SXM")` is one device
of the table with a host around it; `Machine.of_this_host()` is this machine.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dsx_core import nearest

from .devices import ALIASES, DEVICES, FASTER_ATTENTION, NETWORKS, Constants
from .errors import MachineError

__all__ = ["Constants", "Machine"]

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """A device, its host, and the network between hosts.

    Attributes:
        name: what it is called.
        device: "cuda" or "cpu"; a CUDA device has streams.
        memory_bytes: of the device, that a process may use.
        flops: peak floating-point operations per second of matrix products, by dtype ("float32", "bfloat16", ...).
        memory_bandwidth: bytes per second of the device's memory.
        link_bandwidth: bytes per second that a rank sends to other ranks of its host.
        network_bandwidth: the same to ranks of other hosts.
        host_link_bandwidth: bytes per second between a device and its host, per direction.
        ranks_per_host: devices of a host.
        host_memory_bytes: of a host, for all its ranks.
        host_bandwidth: bytes per second of a host's memory, for all its ranks.
        disk_bandwidth: bytes per second of a host's disks, for all its ranks.
        disk_bytes: of a host's disks, for all its ranks; None: not known, so that nothing is too large for them.
        communicator_bytes: of a CUDA device, for each process group over which tensors go; None: by NCCL's sizes
            (`communicators.py`).
        constants: see `Constants`.
        source: where the figures come from.
        calibrated_on: fingerprint of the machine that the constants were measured on; "" where they were not.
    """

    name: str
    device: str
    memory_bytes: int
    flops: dict[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_link_bandwidth: float
    ranks_per_host: int = 8
    host_memory_bytes: int = 1024 * GIB
    host_bandwidth: float = 300e9
    disk_bandwidth: float = 6e9
    disk_bytes: int | None = None
    communicator_bytes: int | None = None
    constants: Constants = field(default_factory=Constants)
    source: str = ""
    calibrated_on: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise MachineError(f"machine.{item.name}: got {value}, expected a number above 0")
        if self.device not in ("cuda", "cpu"):
            raise MachineError(f"machine.device: got {self.device!r}, expected cuda or cpu")
        if not self.flops:
            raise MachineError("machine.flops: got none, expected a peak rate for at least one dtype")

    @property
    def streams(self) -> bool:
        """Does it compute and copy at the same time?"""
        return self.device == "cuda"

    def rate(self, dtype: str) -> float:
        """Operations per second of matrix products of a dtype that are reached; of a dtype that the table lacks, those
        of the slowest.
        """
        return self.flops.get(dtype, min(self.flops.values())) * self.constants.products

    def peak(self, dtype: str) -> float:
        """Peak operations per second of a dtype."""
        return self.flops.get(dtype, min(self.flops.values()))

    def with_attention(self, kernels: str) -> Machine:
        """The machine with these kernels of fused attention: "flash2", or "flash3" where they are faster.

        Raises:
            MachineError: the kernels are unknown, or nobody has fitted how fast attention is on this machine.
        """
        if kernels not in ("flash2", "flash3"):
            raise MachineError(f"attention: got {kernels!r}, expected flash2 or flash3")
        if kernels == "flash2":
            return self
        if self.device != "cuda" or self.constants.attention == 0.0:
            raise MachineError(
                f"attention: got {kernels!r} for {self.name}, where it is not known how fast attention is; expected"
                " flash2, or a machine of Hopper or later (`dsx plan machines`)"
            )
        share = self.constants.attention * FASTER_ATTENTION
        return replace(self, constants=replace(self.constants, attention=share))

    # - making one

    @classmethod
    def named(cls, name: str) -> Machine:
        """A device of the table, with the network of its usual hosts; `"H100-SXM+ethernet-100"` names another network.

        Raises:
            MachineError: the table has no such device or network.
        """
        device, plus, network = name.partition("+")
        device = ALIASES.get(device.lower(), device)
        found = _look_up(device, DEVICES, "device")
        rate = None if not network else _look_up(network, NETWORKS, "network")
        return cls(
            name=device + plus + network,
            device="cuda",
            memory_bytes=int(found.memory_gib * GIB),
            flops={key: value * 1e12 for key, value in found.teraflops.items()},
            memory_bandwidth=found.memory_gbs * 1e9,
            link_bandwidth=found.link_gbs * 1e9,
            network_bandwidth=(found.network_gbs if rate is None else rate.gbs) * 1e9,
            host_link_bandwidth=found.host_link_gbs * 1e9,
            ranks_per_host=found.per_host,
            host_memory_bytes=found.host_gib * GIB,
            host_bandwidth=found.host_gbs * 1e9,
            constants=found.constants,
            source=found.source if rate is None else f"{found.source}; {rate.source}",
        )

    @classmethod
    def of_this_host(cls) -> Machine:
        """This machine: a GPU that the table knows, else the processor with rates that are assumed (`dsx plan
        calibrate` measures them).
        """
        from dsx_core.device import Device, accelerator_kind  # lazy import: looking at a table needs no torch

        if accelerator_kind() == "cuda":
            device = Device("cuda")
            wanted = device.name
            known = device_in_table(wanted)
            if known is None:
                raise MachineError(
                    f"this machine's {wanted} is not in the table of devices ({', '.join(sorted(DEVICES))}); run `dsx"
                    " plan calibrate -o machine.json` here, and give that file"
                )
            memory = device.properties.total_memory
            count = Device.count()
            return replace(
                cls.named(known), memory_bytes=memory, ranks_per_host=count, host_memory_bytes=_host_memory()
            )
        cores = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        memory = _host_memory()
        return cls(
            name="this processor, not calibrated",
            device="cpu",
            memory_bytes=memory,
            flops={"float32": 50e9, "bfloat16": 10e9, "float16": 5e9, "float64": 25e9},
            memory_bandwidth=10e9,
            link_bandwidth=3e9,
            network_bandwidth=1e9,
            host_link_bandwidth=10e9,
            ranks_per_host=cores,
            host_memory_bytes=memory,
            host_bandwidth=20e9,
            disk_bandwidth=1e9,
            source="assumed; `dsx plan calibrate` measures them",
        )

    @classmethod
    def of(cls, given: Machine | str | os.PathLike[str] | None) -> Machine:
        """The machine that an argument names: a machine, a name of the table, a file, or None for this machine."""
        if isinstance(given, Machine):
            return given
        if given is None:
            return cls.of_this_host()
        path = Path(given)
        if path.suffix == ".json" or path.is_file():
            return cls.load(path)
        return cls.named(str(given))

    # - files

    def to_dict(self) -> dict[str, Any]:
        """The machine as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "machine") -> Machine:
        """The opposite of `to_dict`.

        Raises:
            MachineError: keys that are unknown or missing, or values of another type.
        """
        if not isinstance(data, dict):
            raise MachineError(f"{where}: got {type(data).__name__}, expected an object with the figures of a machine")
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(data) - known)
        needed = {"name", "device", "memory_bytes", "flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth",
                  "host_link_bandwidth"}  # fmt: skip
        missing = sorted(needed - set(data))
        if unknown or missing:
            raise MachineError(
                f"{where}: got {'the unknown key ' + unknown[0] if unknown else 'no ' + missing[0]}, expected"
                f" {', '.join(sorted(known))}"
            )
        values = dict(data)
        try:
            values["constants"] = Constants(**values.get("constants", {}))
            return cls(**values)
        except TypeError as error:
            raise MachineError(f"{where}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read what `save` wrote.

        Raises:
            MachineError: there is no such file, or it holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MachineError(f"machine: {path} cannot be read: {error}") from error
        return cls.from_dict(data, where=str(path))

    def stranger(self) -> str:
        """The reason why its constants may not hold here; "" if they were measured here or come from the table."""
        here = fingerprint()
        if not self.calibrated_on or self.calibrated_on == here:
            return ""
        return f"its constants were measured on another machine ({self.calibrated_on}; this one is {here})"


def fingerprint() -> str:
    """An identifier of machines of equal speed: processor, cores, devices."""
    from dsx_core.device import Device, accelerator_kind  # lazy import: as above

    if accelerator_kind() == "cuda":
        return f"{Device.count()} x {Device('cuda').name}"
    return f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown processor"


def device_in_table(name: str) -> str | None:
    """The entry of the table for a device as CUDA names it ("NVIDIA H100 80GB HBM3")."""
    words = name.upper().replace("-", " ").split()  # whole words: GH200 is no H200
    fitting = [key for key, found in DEVICES.items() if all(word in words for word in found.cuda_words)]
    return max(fitting, key=lambda key: len(DEVICES[key].cuda_words), default=None)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB


def _look_up(name: str, table: Any, what: str) -> Any:
    folded = {key.lower(): value for key, value in table.items()}
    if name.lower() in folded:
        return folded[name.lower()]
    near = nearest(name.lower(), folded)
    written = {key.lower(): key for key in table}
    hint = f"; did you mean {' or '.join(written[key] for key in near)}?" if near else "."
    raise MachineError(
        f"machine: the table has no {what} {name!r}{hint} It knows {', '.join(sorted(table))}. For another one give a"
        " file with its figures (`dsx plan calibrate -o machine.json` writes one)"
    )
