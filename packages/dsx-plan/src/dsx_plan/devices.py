"""Data sheets: devices and networks, with where the figures come from.

Rates of matrix products are dense ones, in 10^12 operations per second. Bandwidths are 10^9 bytes per second, per
direction and per device. Memory is what `torch.cuda.get_device_properties` reports on such a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import MachineError

__all__ = ["ALIASES", "DEVICES", "FASTER_ATTENTION", "NETWORKS", "Constants", "Device", "Network"]


@dataclass(frozen=True)
class Constants:
    """The shares of a platform's peak figures that are reached, and fixed costs.

    A calibration measures the first five. Those of the table of devices were fitted to published step times
    (`Device.constants`).

    Attributes:
        products: share of the peak rate that matrix products reach.
        memory: share of the memory bandwidth that other operators reach.
        links: share of a link's rate that collectives reach.
        operator_seconds: what every operator takes beside its work.
        message_seconds: what every message takes beside its bytes, times log2 of the ranks.
        attention: share of the peak rate that fused attention reaches, of the arithmetic that a causal mask leaves; 0:
            it is not known, and attention is planned as a matrix product, the masked half included.
        interference: by which share computation is slower while messages flow beside it.
        jitter: standard deviation of a rank's step, as a share of it. All ranks wait for the slowest one.
    """

    products: float = 0.75
    memory: float = 0.80
    links: float = 0.75
    operator_seconds: float = 4e-6
    message_seconds: float = 1.2e-5
    attention: float = 0.0
    interference: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("products", "memory", "links"):
            if not 0.0 < getattr(self, name) <= 1.5:
                raise MachineError(f"constants.{name}: got {getattr(self, name)}, expected a share above 0")
        for name in ("operator_seconds", "message_seconds"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise MachineError(f"constants.{name}: got {getattr(self, name)}, expected seconds from 0 to below 1")
        for name in ("attention", "interference", "jitter"):
            if not 0.0 <= getattr(self, name) <= 1.5:
                raise MachineError(f"constants.{name}: got {getattr(self, name)}, expected a share from 0")


@dataclass(frozen=True)
class Device:
    """A device and the host that it usually stands in.

    Attributes:
        teraflops: dense matrix products by dtype.
        memory_gib, memory_gbs: memory, and its bandwidth.
        link_gbs: to the other devices of its host.
        host_link_gbs: to the host.
        network_gbs: to other hosts.
        per_host: devices of a host.
        host_gib: memory of the host.
        cuda_words: words of the name that CUDA reports.
        source: of the figures.
        constants: how much of them is reached.
        host_gbs: of the host's memory, for all its devices.
        constants_from: which step times the constants were fitted to; "" where nobody has fitted them, and those of
            another device are taken.
    """

    teraflops: dict[str, float]
    memory_gib: float
    memory_gbs: float
    link_gbs: float
    host_link_gbs: float
    network_gbs: float
    per_host: int
    host_gib: int
    cuda_words: tuple[str, ...]
    source: str
    constants: Constants = field(default_factory=lambda: _AMPERE)
    constants_from: str = ""
    host_gbs: float = 300.0


@dataclass(frozen=True)
class Network:
    """A network: bytes per second and device, in 10^9."""

    gbs: float
    source: str


_V100 = "NVIDIA V100 data sheet (2020): 125 TFLOPS tensor, 15.7 fp32, 900 GB/s, NVLink 300 GB/s both ways"
_A100 = "NVIDIA A100 data sheet (2021): 312 TFLOPS bf16, 156 tf32, NVLink 600 GB/s both ways, PCIe 4"
_H100 = "NVIDIA H100 data sheet (2023): 1979 TFLOPS bf16 with sparsity, that is 989 dense; NVLink 900 GB/s both ways"
_PCIE3, _PCIE4, _PCIE5 = 12.0, 25.0, 50.0  # of 16, 32 and 64: what page-locked copies reach


_AMPERE = Constants()
_HOPPER = Constants(products=0.69, memory=0.69, attention=0.18, interference=0.5)
"""Fitted by `packages/dsx/bench/planner.py fit` to published step times of some models, and judged on other ones."""


def _rates(
    half: float, single: float, *, eight: float = 0.0, four: float = 0.0, bfloat: bool = True
) -> dict[str, float]:
    found = {"float16": half, "float32": single, "float64": single / 2}
    if bfloat:
        found["bfloat16"] = half
    if eight:
        found["float8"] = eight
    if four:
        found["float4"] = four
    return found


DEVICES: dict[str, Device] = {
    "V100-16": Device(
        _rates(125, 15.7, bfloat=False), 15.77, 900, 150, _PCIE3, 12.5, 8, 512, ("V100", "16GB"),
        f"{_V100}; hosts with 8 devices and one 100 Gb/s port each",
    ),
    "V100-32": Device(
        _rates(125, 15.7, bfloat=False), 31.74, 900, 150, _PCIE3, 6.25, 16, 1536, ("V100", "32GB"),
        f"{_V100}; DGX-2: 16 devices, 8 ports of 100 Gb/s",
    ),
    "T4": Device(
        _rates(65, 8.1, bfloat=False), 14.75, 320, _PCIE3, _PCIE3, 3.1, 4, 192, ("T4",), "NVIDIA T4 data sheet (2019)"
    ),
    "A10": Device(
        _rates(125, 31.2), 22.3, 600, _PCIE4, _PCIE4, 3.1, 4, 192, ("A10",), "NVIDIA A10 data sheet (2021), dense"
    ),
    "A100-40": Device(
        _rates(312, 156), 39.39, 1555, 300, _PCIE4, 25, 8, 1024, ("A100", "40GB"),
        f"{_A100}; 1555 GB/s; hosts with 8 devices and a 200 Gb/s port each",
    ),
    "A100-80": Device(
        _rates(312, 156), 79.15, 2039, 300, _PCIE4, 25, 8, 2048, ("A100", "80GB"),
        f"{_A100}; 2039 GB/s; hosts with 8 devices and a 200 Gb/s port each",
    ),
    "L4": Device(
        _rates(121, 60, eight=242), 22.05, 300, _PCIE4, _PCIE4, 3.1, 4, 192, ("L4",),
        "NVIDIA L4 data sheet (2023), dense",
    ),
    "L40S": Device(
        _rates(362, 183, eight=733), 44.4, 864, _PCIE4, _PCIE4, 12.5, 8, 1024, ("L40S",),
        "NVIDIA L40S data sheet (2023), dense",
    ),
    "RTX-4090": Device(
        _rates(165, 82.6, eight=330), 23.6, 1008, _PCIE4, _PCIE4, 3.1, 4, 256, ("4090",),
        "NVIDIA Ada whitepaper 1.1 (2023), dense, fp32 accumulation",
    ),
    "H100-PCIE": Device(
        _rates(756, 378, eight=1513), 79.18, 2000, 50, _PCIE5, 25, 8, 2048, ("H100", "PCIE"), _H100, _HOPPER,
    ),
    "H100-SXM": Device(
        _rates(989, 495, eight=1979), 79.18, 3350, 450, _PCIE5, 50, 8, 2048, ("H100", "HBM3"),
        f"{_H100}; 3350 GB/s; hosts with 8 devices and a 400 Gb/s port each",
        _HOPPER, "MosaicML's MPT 1b, 7b and 30b on H100",
    ),
    "H100-SXM-96": Device(
        _rates(989, 495, eight=1979), 94.5, 2400, 450, _PCIE5, 50, 8, 2048, ("H100", "HBM2E"),
        f"{_H100}; 96 GB of HBM2e, 2400 GB/s (torchtitan's benchmarks); hosts with 8 devices and a 400 Gb/s port each",
        _HOPPER,
    ),
    "H200-SXM": Device(
        _rates(989, 495, eight=1979), 139.8, 4800, 450, _PCIE5, 50, 8, 2048, ("H200",),
        "NVIDIA H200 data sheet (2024): as H100, 4800 GB/s; hosts with 8 devices and a 400 Gb/s port each", _HOPPER,
    ),
    "GH200": Device(
        _rates(989, 495, eight=1979), 94.5, 4000, 450, 400, 50, 1, 480, ("GH200",),
        "NVIDIA GH200 data sheet (2023): 96 GB HBM3, NVLink-C2C 900 GB/s both ways, LPDDR5X up to 512 GB/s", _HOPPER,
        host_gbs=512,
    ),
    "B200": Device(
        _rates(2250, 1125, eight=4500, four=9000), 178.4, 8000, 900, _PCIE5, 50, 8, 4096, ("B200",),
        "NVIDIA DGX B200 data sheet (2024): 36 PFLOPS bf16 with sparsity for 8, NVLink 1800 GB/s both ways", _HOPPER,
    ),
    "GB200": Device(
        _rates(2500, 1250, eight=5000, four=10000), 184, 8000, 900, 225, 50, 72, 17280, ("GB200",),
        "NVIDIA GB200 NVL72 data sheet (2024), a 72nd of it: 360 PFLOPS bf16 with sparsity, 13.4 TB HBM3e; NVLink"
        " 1800 GB/s both ways; a Grace with NVLink-C2C of 900 GB/s both ways for two devices; the 72 devices of a"
        " NVLink domain count as one host, with 36 times 512 GB/s of LPDDR5X", _HOPPER, host_gbs=36 * 512,
    ),
    "GB300": Device(
        _rates(2500, 1250, eight=5000, four=15000), 277, 8000, 900, 225, 100, 72, 17280, ("GB300",),
        "NVIDIA GB300 NVL72 data sheet (2025), a 72nd of it: as GB200, 20 TB HBM3e, 1100 PFLOPS fp4 dense, a port of"
        " 800 Gb/s each", _HOPPER, host_gbs=36 * 512,
    ),
    "MI300X": Device(
        _rates(1307, 654, eight=2615), 191.5, 5300, 384, _PCIE5, 50, 8, 2048, ("MI300X",),
        "AMD MI300X data sheet (2023): 7 links of 128 GB/s both ways", _HOPPER,
    ),
}  # fmt: skip
"""Devices by name. A device that is built into several kinds of hosts has the figures of its usual servers."""

FASTER_ATTENTION = 2.2
"""By how much attention of cuDNN or FlashAttention-3 is faster on Hopper and later than what `Constants.attention` was
fitted to, forward and backward together. FlashAttention-3 (arXiv 2407.08608) says 1.5 to 2.0 and 1.5 to 1.75 times
FlashAttention-2; cuDNN is a little faster. Chosen with one row in sight, Llama-3 8B of Megatron-Bridge on H100.
"""

ALIASES = {"v100": "V100-32", "a100": "A100-80", "h100": "H100-SXM", "h200": "H200-SXM", "4090": "RTX-4090"}
"""Common names of devices with more than one entry, or with a longer name: that of the usual servers."""

NETWORKS: dict[str, Network] = {
    "infiniband-ndr": Network(50.0, "NDR InfiniBand, a 400 Gb/s port for each device"),
    "infiniband-hdr": Network(25.0, "HDR InfiniBand, a 200 Gb/s port for each device"),
    "infiniband-hdr-shared": Network(12.5, "HDR InfiniBand, a 200 Gb/s port for two devices"),
    "infiniband-edr": Network(12.5, "EDR InfiniBand, a 100 Gb/s port for each device"),
    "infiniband-edr-shared": Network(6.25, "EDR InfiniBand, a 100 Gb/s port for two devices"),
    "efa-3200": Network(50.0, "3200 Gb/s for a host of 8 devices"),
    "efa-400": Network(6.25, "400 Gb/s for a host of 8 devices"),
    "ethernet-100": Network(1.5625, "100 Gb/s for a host of 8 devices"),
    "ethernet-40": Network(0.625, "40 Gb/s for a host of 8 devices"),
    "ethernet-10": Network(0.156, "10 Gb/s for a host of 8 devices"),
}
"""Networks by name."""
