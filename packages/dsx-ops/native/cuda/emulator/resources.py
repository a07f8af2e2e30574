"""Registers, shared memory and spills of the CUDA kernels, as the compiler reports them; no GPU is needed.

The idea: nvcc compiles every source for one architecture with `-Xptxas -v`, and keeps the PTX, in which the launch
bounds of a kernel stand. From both follows how many threads of a kernel a multiprocessor holds at once. `resources.tsv`
keeps the numbers of one release of nvcc; the tests compare with it. What it leaves out: everything that only a run can
show.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).resolve().with_name("resources.tsv")
INCLUDE = (SOURCES.parent / "include", SOURCES.parents[3] / "tools" / "native")
ARCHS = (80, 90, 100)
WARP = 32
# Per multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities"): registers, threads, blocks, bytes of shared
# memory.
LIMITS = {80: (65536, 2048, 32, 164 << 10), 90: (65536, 2048, 32, 228 << 10), 100: (65536, 2048, 32, 228 << 10)}
REGISTER_UNIT = 256  # a warp's registers are given out in pieces of this
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system takes for every block

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.S,
)
SHARED = re.compile(r"(\d+) bytes smem")
BOUNDS = re.compile(r"\.entry (\w+)\(.*?\)\s*((?:\.\w+ [\d, ]+\s*)*)\{", re.S)
THREADS = re.compile(r"\.maxntid (\d+)")
FIELDS = ("source", "kernel", "arch", "threads", "registers", "shared", "stack", "spilled")


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture. `threads`: of its largest block. `shared`, `stack`, `spilled`: bytes."""

    source: str
    kernel: str
    arch: int
    threads: int
    registers: int
    shared: int
    stack: int
    spilled: int

    def resident(self) -> int:
        """Threads that a multiprocessor holds at once."""
        registers, threads, blocks, shared = LIMITS[self.arch]
        warps = -(-self.threads // WARP)
        per_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        fitting = min(registers // per_warp // warps, threads // self.threads, blocks)
        return self.threads * min(fitting, shared // (self.shared + BLOCK_OVERHEAD))

    def occupancy(self) -> float:
        """The share of a multiprocessor's threads that can be there at once."""
        return self.resident() / LIMITS[self.arch][1]


def nvcc() -> str | None:
    """nvcc of CUDA_HOME, else of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")


def release(compiler: str) -> str:
    """The release of nvcc, as "13.0"."""
    text = subprocess.check_output([compiler, "--version"], text=True)
    found = re.search(r"release ([\d.]+)", text)
    return found.group(1) if found else text


def sources() -> list[Path]:
    """The sources with kernels in them."""
    return sorted(p for p in SOURCES.glob("*.cu") if "__global__" in p.read_text() or "rows.cuh" in p.read_text())


def _short(mangled: Iterable[str]) -> dict[str, str]:
    """Readable names without arguments and namespaces."""
    names = list(mangled)
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    found = {}
    for name, line in zip(names, text.splitlines()):
        line = line.replace("dsx::cuda::(anonymous namespace)::", "").replace("dsx::cuda::", "").replace("dsx::", "")
        line = re.sub(r"\((?:DType|anonymous namespace)\)(\d)", r"\1", line).removeprefix("void ")
        depth, end = 0, len(line)
        for at, letter in enumerate(line):  # the arguments begin at the first bracket outside of <>
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                end = at
                break
        found[name] = line[:end]
    return found


def measure(source: Path, arch: int, compiler: str) -> list[Resources]:
    """Compile one source for one architecture. Raises `CalledProcessError` with the compiler's output."""
    include = [f"-I{i}" for i in INCLUDE]
    with tempfile.TemporaryDirectory(prefix="dsx-resources-") as folder:
        command = [
            compiler,
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "-cubin",
            f"-arch=sm_{arch}",
            "-Xptxas",
            "-v",
            *include,
        ]
        command += ["-keep", "-keep-dir", folder, str(source), "-o", str(Path(folder, "out.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ptx = "".join(p.read_text() for p in Path(folder).glob("*.ptx"))
    bounds = {name: THREADS.search(rest) for name, rest in BOUNDS.findall(ptx)}
    entries = list(ENTRY.finditer(done.stdout + done.stderr))
    short = _short(e["name"] for e in entries)
    found = []
    for e in entries:
        threads, shared = bounds.get(e["name"]), SHARED.search(e["rest"])
        if threads is None:
            raise ValueError(f"{short[e['name']]} in {source.name} has no __launch_bounds__")
        numbers = (int(threads.group(1)), int(e["registers"]), int(shared.group(1)) if shared else 0, int(e["stack"]))
        spilled = int(e["stores"]) + int(e["loads"])
        found.append(Resources(source.stem, short[e["name"]], int(e["arch"]), *numbers, spilled))
    return sorted(found, key=lambda r: r.kernel)


def read_table() -> tuple[str, list[Resources]]:
    """The release of nvcc and the kernels of `resources.tsv`."""
    first, _, *lines = TABLE.read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    return first.split()[-1], [Resources(r[0], r[1], *map(int, r[2:])) for r in rows]


def write_table(found: list[Resources], compiler: str) -> None:
    """Replace `resources.tsv`."""
    lines = [f"# compiled by nvcc {release(compiler)}", "\t".join(FIELDS)]
    lines += ["\t".join(str(getattr(r, f)) for f in FIELDS) for r in found]
    TABLE.write_text("\n".join(lines) + "\n")
