"""Data sheets: devices and networks, with where the figures come from.

Rates of matrix products are dense ones, in 10^12 operations per second. Bandwidths are 10^9 bytes per second, per
direction and per device. Memory is what `torch.cuda.get_device_properties` reports on such a device.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEVICES", "NETWORKS", "Device", "Network"]


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


@dataclass(frozen=True)
class Network:
    """A network: bytes per second and device, in 10^9."""

    gbs: float
    source: str


_V100 = "NVIDIA V100 data sheet (2020): 125 TFLOPS tensor, 15.7 fp32, 900 GB/s, NVLink 300 GB/s both ways"
_A100 = "NVIDIA A100 data sheet (2021): 312 TFLOPS bf16, 156 tf32, NVLink 600 GB/s both ways, PCIe 4"
_H100 = "NVIDIA H100 data sheet (2023): 1979 TFLOPS bf16 with sparsity, that is 989 dense; NVLink 900 GB/s both ways"
_PCIE3, _PCIE4, _PCIE5 = 12.0, 25.0, 50.0  # of 16, 32 and 64: what page-locked copies reach


def _rates(half: float, single: float, *, eight: float = 0.0, bfloat: bool = True) -> dict[str, float]:
    found = {"float16": half, "float32": single, "float64": single / 2}
    if bfloat:
        found["bfloat16"] = half
    if eight:
        found["float8"] = eight
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
        _rates(756, 378, eight=1513), 79.18, 2000, 50, _PCIE5, 25, 8, 2048, ("H100", "PCIE"), _H100,
    ),
    "H100-SXM": Device(
        _rates(989, 495, eight=1979), 79.18, 3350, 450, _PCIE5, 50, 8, 2048, ("H100", "HBM3"),
        f"{_H100}; 3350 GB/s; hosts with 8 devices and a 400 Gb/s port each",
    ),
    "H200-SXM": Device(
        _rates(989, 495, eight=1979), 139.8, 4800, 450, _PCIE5, 50, 8, 2048, ("H200",),
        "NVIDIA H200 data sheet (2024): as H100, 4800 GB/s; hosts with 8 devices and a 400 Gb/s port each",
    ),
    "GH200": Device(
        _rates(989, 495, eight=1979), 94.5, 4000, 450, 400, 50, 1, 480, ("GH200",),
        "NVIDIA GH200 data sheet (2023): 96 GB HBM3, NVLink-C2C 900 GB/s both ways",
    ),
    "B200": Device(
        _rates(2250, 1125, eight=4500), 178.4, 8000, 900, _PCIE5, 50, 8, 4096, ("B200",),
        "NVIDIA DGX B200 data sheet (2024): 36 PFLOPS bf16 with sparsity for 8, NVLink 1800 GB/s both ways",
    ),
    "MI300X": Device(
        _rates(1307, 654, eight=2615), 191.5, 5300, 384, _PCIE5, 50, 8, 2048, ("MI300X",),
        "AMD MI300X data sheet (2023): 7 links of 128 GB/s both ways",
    ),
}  # fmt: skip
"""By name. What stands in more than one kind of host has the one of its usual servers."""

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
"""By name."""
