"""``dsx doctor``: report what this machine and installation offer, what is missing, and what to do about it.

Each probe answers one question. A probe that fails is reported as a finding, and the other probes still run. Nothing is
changed or compiled; the only programs started are compilers, for their versions. The exit code is 0 if a training run
can start here, and 1 if something that it needs is broken; warnings do not change it.

Left out: benchmarks, and checks of other hosts.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from dsx_core import CommandParser

from ._version import DISTRIBUTION, __version__
from .errors import in_checkout
from .siblings import needed_siblings

OK, WARNING, BROKEN = "ok", "warning", "broken"
SMALL_SHM_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``hint`` says what to do; it is empty if nothing has to be done."""

    topic: str
    name: str
    value: str
    status: str = OK
    hint: str = ""


def python_and_system() -> list[Finding]:
    return [
        Finding("system", "python", f"{platform.python_version()} ({sys.executable})"),
        Finding("system", "platform", platform.platform()),
        Finding("system", "cpu cores", f"{os.cpu_count()} ({_usable_cores()} usable by this process)"),
    ]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def packages() -> list[Finding]:
    """Our distributions and their versions, which must be that of dsx: `initialize` refuses others."""
    found = []
    wanted = metadata.version(DISTRIBUTION)
    for name in (DISTRIBUTION, *needed_siblings()):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(Finding("packages", name, "not installed", BROKEN, in_checkout(name)))
            continue
        if version == wanted:
            found.append(Finding("packages", name, version))
        else:
            found.append(Finding("packages", name, version, BROKEN, f"dsx is {wanted}; {in_checkout(name)}"))
    return found


def torch_and_devices() -> list[Finding]:
    """torch, what it was built for, and the devices it sees."""
    import torch
    from dsx_core.device import Device, accelerator_kind

    kind = accelerator_kind()
    found = [
        Finding("torch", "version", f"{torch.__version__} ({os.path.dirname(torch.__file__)})"),
        Finding("torch", "built for CUDA", str(torch.version.cuda or "no")),
    ]
    if torch.version.cuda and kind is None:
        found.append(
            Finding(
                "torch",
                "devices",
                "none",
                WARNING,
                "torch is built for CUDA but sees no device: check the driver (nvidia-smi)",
            )
        )
        return found
    for index in range(Device.count()):
        device = Device(kind or "", index).properties
        capability = f", sm_{device.major}{device.minor}" if hasattr(device, "major") else ""
        text = f"{device.name}, {device.total_memory / 2**30:.0f} GiB{capability}"
        found.append(Finding("torch", f"device {index}", text))
    if kind is None:
        found.append(Finding("torch", "devices", "none; jobs run on the CPU (dsx launch --num_procs N)"))
    return found


def driver() -> list[Finding]:
    """The NVIDIA driver, as the kernel reports it."""
    path = "/proc/driver/nvidia/version"
    if not os.path.exists(path):
        return [Finding("torch", "NVIDIA driver", "none")]
    with open(path, encoding="utf-8") as file:
        return [Finding("torch", "NVIDIA driver", file.readline().strip())]


def backends() -> list[Finding]:
    """The communication backends torch was built with."""
    import torch.distributed as dist

    if not dist.is_available():
        return [
            Finding(
                "communication",
                "torch.distributed",
                "not built in",
                BROKEN,
                "install a build of torch with distributed support",
            )
        ]
    there = [name for name, check in _backend_checks(dist) if check()]
    return [
        Finding(
            "communication",
            "backends",
            ", ".join(there) or "none",
            OK if there else BROKEN,
            "" if there else "torch offers no backend",
        )
    ]


def _backend_checks(dist: object) -> list[tuple[str, Callable[[], bool]]]:
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    checks = [(name, getattr(dist, f"is_{name}_available", None)) for name in names]
    return [(name, check) for name, check in checks if check is not None]


def transports() -> list[Finding]:
    """The additions of dsx-comm to torch's backends: its shared-memory group, and the kernels of its compressed
    collectives.
    """
    import dsx_comm

    status, codec = dsx_comm.native_status(), dsx_comm.compressed.codec_status()
    shared = (
        Finding("communication", "dsx (shared memory)", "yes; the default between CPU processes of one machine")
        if status["native"]
        else Finding(
            "communication", "dsx (shared memory)", f"no: {status['reason']}", WARNING, "gloo serves instead, slower"
        )
    )
    kernels = Finding(
        "communication",
        "compression",
        "kernels of dsx-ops" if codec["native"] else f"plain torch: {codec['reason']}",
        OK if codec["native"] else WARNING,
        "" if codec["native"] else "everything works, compressed collectives are slower",
    )
    return [shared, kernels]


_SLOWER_WITHOUT = {
    "dsx_ops": "optimizers on the CPU are slower",
    "dsx_comm": "collectives between processes of one machine are slower",
    "dsx_nvme": "tensor I/O to disk is slower",
    "dsx_sparse_attn": "attention on the CPU is several times slower",
}


def native_code() -> list[Finding]:
    """For every package: whether its compiled part is there, for which instruction set, or why not."""
    import dsx_comm
    import dsx_nvme
    import dsx_ops
    import dsx_sparse_attn

    found = []
    for module in (dsx_ops, dsx_comm, dsx_nvme, dsx_sparse_attn):
        status = module.native_status()
        name, slower = module.__name__.replace("_", "-"), _SLOWER_WITHOUT[module.__name__]
        if not status["native"]:
            found.append(
                Finding("native code", name, f"not in use: {status['reason']}", WARNING, f"everything works, {slower}")
            )
            continue
        isas = f"{status['isa']} in use; this CPU runs {', '.join(status['isas'])}" if "isa" in status else "in use"
        found.append(Finding("native code", name, isas))
    threads = dsx_ops.native_status().get("threads")
    if threads:
        found.append(Finding("native code", "threads", f"{threads['count']} ({threads['backend']})"))
    found.append(Finding("native code", "CUDA tensors", str(dsx_ops.native_status().get("cuda", "no"))))
    return found


def disk_engines() -> list[Finding]:
    """The engines that dsx-nvme can use here, the best first, and why the others cannot run."""
    import dsx_nvme

    engines = dsx_nvme.native_status()["engines"]
    return [Finding("disk", name, f"no: {reason}" if reason else "yes") for name, reason in engines.items()]


def sparse_attention() -> list[Finding]:
    """The backends of dsx-sparse-attn that run here, and why the others do not."""
    import dsx_sparse_attn

    found = []
    for name, reason in dsx_sparse_attn.backend_status().items():
        missed = name == "native" and bool(reason)  # other backends are for devices that need not be there
        hint = "everything works, attention on the CPU is several times slower" if missed else ""
        value = f"no: {reason}" if reason else "yes"
        found.append(Finding("sparse attention", name, value, WARNING if missed else OK, hint))
    return found


def shared_memory() -> list[Finding]:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return [
            Finding("limits", path, "not there", WARNING, "data loaders with workers and gloo between processes use it")
        ]
    usage = shutil.disk_usage(path)
    small = usage.total < SMALL_SHM_BYTES
    hint = "too small for data loader workers; in a container: docker run --shm-size=8g" if small else ""
    return [
        Finding(
            "limits",
            path,
            f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free",
            WARNING if small else OK,
            hint,
        )
    ]


def limits() -> list[Finding]:
    """Locked memory (pinned buffers) and open files (sockets between many ranks)."""
    import resource

    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    tight = locked != unlimited and locked < 64 * 2**20
    few = files != unlimited and files < 4096
    return [
        Finding(
            "limits",
            "locked memory (ulimit -l)",
            "unlimited" if locked == unlimited else f"{locked / 2**20:.0f} MiB",
            WARNING if tight else OK,
            "InfiniBand and io_uring register memory: raise it to unlimited" if tight else "",
        ),
        Finding(
            "limits",
            "open files (ulimit -n)",
            "unlimited" if files == unlimited else str(files),
            WARNING if few else OK,
            "many ranks or data loader workers need more: ulimit -n 65536" if few else "",
        ),
    ]


def compilers() -> list[Finding]:
    """The compilers, which are needed only for building from source."""
    found = []
    for name in (os.environ.get("CXX") or "c++", "nvcc", "ninja"):
        path = shutil.which(name)
        if path is None:
            found.append(Finding("compilers", name, "none (needed only to build from source)"))
            continue
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
        lines = [line for line in answer.stdout.splitlines() if line.strip()]
        chosen = [line for line in lines if "release" in line] if name == "nvcc" else lines
        found.append(Finding("compilers", name, f"{(chosen or ['?'])[0].strip()} ({path})"))
    return found


def launching() -> list[Finding]:
    """The programs that can start processes on other hosts."""
    there = [name for name in ("ssh", "pdsh", "mpirun", "srun") if shutil.which(name)]
    return [Finding("launching", "ways to other hosts", ", ".join(there) or "none (one machine only)")]


PROBES: tuple[Callable[[], list[Finding]], ...] = (
    python_and_system,
    packages,
    torch_and_devices,
    driver,
    backends,
    transports,
    native_code,
    sparse_attention,
    shared_memory,
    limits,
    compilers,
    disk_engines,
    launching,
)
_VITAL = (packages, torch_and_devices, backends)


def probes_of_others() -> list[Callable[[], list[Finding]]]:
    """Probes of installed packages that depend on dsx: entry points of the group `dsx.doctor`."""
    return [entry.load() for entry in metadata.entry_points(group="dsx.doctor")]


def examine(probes: Sequence[Callable[[], list[Finding]]] | None = None) -> list[Finding]:
    """Run every probe (default: those of dsx and of other packages). A probe that fails becomes a finding with the
    exception.
    """
    found: list[Finding] = []
    for probe in (*PROBES, *probes_of_others()) if probes is None else probes:
        try:
            found.extend(probe())
        except Exception as error:  # noqa: BLE001 - a probe may fail in any way; that is what is reported
            status = BROKEN if probe in _VITAL else WARNING
            found.append(
                Finding(
                    "probes",
                    probe.__name__.replace("_", " "),
                    f"{type(error).__name__}: {error}",
                    status,
                    "this question could not be answered",
                )
            )
    return found


def render(findings: Sequence[Finding]) -> None:
    """Print the findings as one table per topic."""
    from rich.console import Console  # lazy import: only the printed report needs it
    from rich.table import Table
    from rich.text import Text

    # A pipe or a file has no width, and the default of 80 columns would fold most values.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    colours = {OK: "", WARNING: "yellow", BROKEN: "red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in ("topic", "name"):
        table.add_column(column, no_wrap=True)
    table.add_column("value", overflow="fold")
    last = ""
    for finding in findings:
        mark = "" if finding.status == OK else f"{finding.status}: "
        value = Text(mark + finding.value, style=colours[finding.status])
        if finding.hint:
            value.append(f"\n-> {finding.hint}", style="dim")
        table.add_row(Text(finding.topic if finding.topic != last else "", style="bold"), Text(finding.name), value)
        last = finding.topic
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in (BROKEN, WARNING)}
    console.print(Text(f"\n{counts[BROKEN]} broken, {counts[WARNING]} warning(s)"))


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx doctor") -> int:
    """Run the command line. Returns 0, or 1 if something that a training run needs is broken."""
    parser = CommandParser(
        prog=prog,
        version=f"dsx {__version__}",
        description="Report what this machine and installation offer, and what is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    findings = examine()
    healthy = all(finding.status != BROKEN for finding in findings)
    if args.json:
        sys.stdout.write(
            json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=1) + "\n"
        )
    else:
        render(findings)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
