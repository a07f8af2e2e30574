"""Starts `device_program.py` on ranks of its own and reads what they wrote.

Torch must be started under the simulated device, so a process is shared by many cases.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from device_matrix import CASES

HERE = Path(__file__).resolve().parent
Results = dict[tuple[str, str], list[dict[str, Any]]]
"""By case and mode: what every rank wrote."""


@functools.cache
def need_compiler() -> None:
    """Build the simulated device, or skip the test where that is impossible."""
    if os.environ.get("CXX") is None and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler on this machine: the simulated device cannot be built")
    import dsx_simcuda

    dsx_simcuda.build()


def run_code(code: str, *, mode: str = "random", world: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program on two simulated devices, in a process of its own, or in one for each of `world` ranks."""
    need_compiler()
    start = ["-c", code]
    with tempfile.TemporaryDirectory() as folder:
        if world > 1:
            script = Path(folder, "program.py")
            script.write_text(code)
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(script)]
        command = [sys.executable, "-m", "dsx_simcuda", "--devices", "2", "--mode", mode, *start]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(
    names: Sequence[str],
    world: int,
    modes: str = "each",
    *,
    simulated: bool = True,
    options: Sequence[tuple[str, str]] = (),
    limit_s: float = 850,
) -> tuple[Results, str]:
    """Run cases on `world` ranks. Returns what they wrote, and the end of their output."""
    if simulated:
        need_compiler()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSX_SIMCUDA", "RANK", "WORLD_SIZE", "LOCAL_"))}
    kept |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    kept |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "LOCAL_RANK": "0", **dict(options)}
    kept["DSX_SIMCUDA_DEVICES"] = "2"
    with tempfile.TemporaryDirectory() as folder:
        program = [str(HERE / "device_program.py"), folder, modes, ",".join(names)]
        command = [sys.executable, *(["-m", "dsx_simcuda"] if simulated else []), *program]
        ranks = []
        for rank in range(world):
            with open(Path(folder) / f"output{rank}", "w") as output:
                variables = {**kept, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        try:
            for process in ranks:
                process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        ends = [f"rank {r}: " + (Path(folder) / f"output{r}").read_text()[-3000:] for r in range(world)]
        found: Results = {}
        for rank in range(world):
            written = Path(folder) / f"rank{rank}.jsonl"
            for line in written.read_text().splitlines() if written.exists() else ():
                result = json.loads(line)
                found.setdefault((result["name"], result["mode"]), []).append(result)
    return found, "\n".join(ends)


@functools.cache
def on_the_cpu(names: tuple[str, ...], world: int) -> tuple[Results, str]:
    """The same cases without the simulated device."""
    return start(names, world, "cpu", simulated=False)


def check(name: str, world: int, mode: str, simulated: tuple[Results, str], reference: tuple[Results, str]) -> None:
    """Every rank has the CPU's losses, and nothing was reported. What is before a colon in `name` is left out there."""
    known = name.rpartition(":")[2]
    for wanted, (results, output) in ((name, simulated), (known, reference)):
        ranks = [r for (case, of), found in results.items() if case == wanted and of in (mode, "cpu") for r in found]
        assert len(ranks) == world, f"{name}: not all ranks came to the end\n{output}"
        assert not any(r["error"] for r in ranks), "\n".join(r["error"] for r in ranks)
    got, expected = simulated[0][name, mode], reference[0][known, "cpu"]
    reports = [report for rank in got for report in rank["reports"]]
    assert not reports, f"{sum(r['count'] for r in got)} reports\n" + "\n".join(reports)
    for ours, theirs in zip(got, expected):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=CASES[known].tolerance), "losses differ"
