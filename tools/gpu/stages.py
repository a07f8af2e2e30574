"""The stages of `tools/dev.py gpu`: for each what it runs, and its limit in seconds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from devenv import ROOT, Environment, all_packages

from gpu.environment import cuda_toolkit
from gpu.running import Program, Record, read_records

PROGRAMS = Path(__file__).resolve().parent / "programs"
# One thread a test, as everywhere in the workspace.
TEST_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
NO_TESTS, REPORTS_FOUND = 5, 86  # exit codes of pytest and of the simulated device
SAME = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 2e-3}


@dataclass(frozen=True)
class Here:
    """Where the stages run: `folder` is that of the stage's own files, `report` that of the report."""

    environment: Environment
    folder: Path
    report: Path
    simulated: bool
    trouble: str = ""  # why native code for the CPU is missing

    def program(self, name: str, file: str, *arguments: str, **env: str) -> Program:
        """One of the programs beside this file, in the environment."""
        return Program(name, [str(self.environment.python), str(PROGRAMS / file), *arguments], env)


def versions(here: Here) -> Iterator[Program | Record]:
    """Versions, devices and tools."""
    yield here.program("versions", "versions.py")


def build(here: Here) -> Iterator[Program | Record]:
    """The CUDA modules; without nvcc the kernels are left out."""
    if here.trouble:
        yield Record("native code for the CPU", "bad", f"does not compile\n{here.trouble}")
    toolkit = cuda_toolkit()
    if toolkit is None or os.environ.get("DSX_BUILD_NATIVE") == "0":
        why = "nvcc is neither in CUDA_HOME/bin, nor on PATH, nor in /usr/local/cuda"
        yield Record("CUDA modules", "skipped", why if toolkit is None else "DSX_BUILD_NATIVE=0 asks for none")
        return
    for package in all_packages().values():
        if 'cuda_module = "' not in (package.path / "pyproject.toml").read_text(encoding="utf-8"):
            continue
        flags = ["--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-q"]
        command = [str(here.environment.python), "-m", "pip", "install", *flags, "-e", str(package.path)]
        yield Program(f"{package.name} for CUDA", command, {"DSX_BUILD_CUDA": "1", **toolkit})
    # On the simulated device a module that was compiled cannot be loaded.
    yield here.program("CUDA modules", "kernels.py", *([] if here.simulated else ["demanded"]))


def parity(here: Here) -> Iterator[Program | Record]:
    """Losses of the matrix against plain torch; each once more with launches that wait: a difference is a race."""
    yield here.program("parity", "parity.py", **TEST_ENV)
    first = read_records(here.folder / "parity.jsonl")
    yield here.program("parity blocking", "parity.py", CUDA_LAUNCH_BLOCKING="1", **TEST_ENV)
    yield from races(first, read_records(here.folder / "parity-blocking.jsonl"))


def races(free: Iterable[Record], blocking: Iterable[Record]) -> Iterator[Record]:
    """Where losses depend on whether launches wait; `free` and `blocking` are the records of both runs."""
    others = {record.name: record.figures for record in blocking}
    compared = 0
    for record in free:
        found, other = record.figures.get("losses"), others.get(record.name, {}).get("losses")
        if not found or not other:
            continue
        compared += 1
        room = next((value for dtype, value in SAME.items() if dtype in record.name), 1e-6)
        # A difference that is no number counts as one.
        if not all(abs(a - b) <= room * max(1e-6, abs(b)) for a, b in zip(found, other)):
            text = "a race: losses change when launches wait (CUDA_LAUNCH_BLOCKING=1)"
            yield Record(record.name, "bad", text, {"free": found, "blocking": other})
    yield Record("free against blocking launches", "good" if compared else "skipped", f"{compared} cases compared")


def syncs(here: Here) -> Iterator[Program | Record]:
    """Waits of the host in a step as errors of torch; torch's own sanitizer around steps."""
    yield here.program("waits of the host", "syncs.py", **TEST_ENV)
    if here.simulated:
        yield Record("torch's sanitizer", "skipped", "it needs CUDA's own calls; the simulated device has a detector")
    else:
        yield here.program("torch's sanitizer", "syncs.py", "sanitizer", TORCH_CUDA_SANITIZER="1", **TEST_ENV)


def tests(here: Here) -> Iterator[Program | Record]:
    """The tests that need a GPU, package by package."""
    # Reports of the simulated device change the exit code of pytest, which keeps what a test that passes has printed.
    races = {"DSX_SIMCUDA_REPORT": str(here.folder / "races")} if here.simulated else {}
    for package in [*all_packages().values()]:
        folder = package.path / "tests"
        marked = [f for f in sorted(folder.glob("**/test_*.py")) if "mark.gpu" in f.read_text(encoding="utf-8")]
        if not marked:
            continue
        files = [str(f.relative_to(ROOT)) for f in marked]
        command = [str(here.environment.python), "-m", "pytest", "-q", "-m", "gpu", "--tb=short", *files]
        xml = here.folder / f"{package.name}.xml"
        env = {**TEST_ENV, **races}
        yield Program(f"tests of {package.name}", [*command, f"--junit-xml={xml}"], env, (0, NO_TESTS))
        yield from test_records(package.name, xml)


def test_records(package: str, xml: Path) -> Iterator[Record]:
    """What pytest wrote: the counts, and every test that was skipped, with the reason."""
    import xml.etree.ElementTree as tree

    if not xml.is_file():
        return
    cases = list(tree.parse(xml).getroot().iter("testcase"))
    failed = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = [(case, found) for case in cases if (found := case.find("skipped")) is not None]
    passed = len(cases) - failed - len(skipped)
    verdict = "bad" if failed else "good" if passed else "skipped"
    figures = {"passed": passed, "failed": failed, "skipped": len(skipped)}
    yield Record(f"{package}: counts", verdict, "", figures)
    for case, found in skipped:
        yield Record(f"{package}: {case.get('name')}", "skipped", found.get("message") or "")


def speed(here: Here) -> Iterator[Program | Record]:
    """Step time of 350 M and 1.3 B against plain torch and FSDP2, and one trace."""
    for size in ("350M", "1.3B"):
        for system in ("torch", "fsdp2", "dsx0", "dsx2", "dsx3"):
            traced = (size, system) == ("350M", "dsx3")
            extra = ["--trace", str(here.report / "trace-350M-dsx3.json")] if traced else []
            yield here.program(f"{size} {system}", "speed.py", size, system, *extra)


def memory(here: Here) -> Iterator[Program | Record]:
    """Peak, retries of the allocator and locked bytes against `dsx plan`."""
    for stage, place in [(0, "none"), (2, "none"), (2, "optimizer on host"), (3, "none"), (3, "parameters on host")]:
        yield here.program(f"memory of stage {stage} {place}", "memory.py", str(stage), place)


def largest(here: Here) -> Iterator[Program | Record]:
    """The largest model that `dsx plan` promises by placement, under a limit of memory, trained."""
    yield here.program("largest model", "largest.py")


def sanitize(here: Here) -> Iterator[Program | Record]:
    """compute-sanitizer over the kernels."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None or here.simulated:
        yield Record(
            "kernels", "skipped", "compute-sanitizer is not on PATH" if tool is None else "no CUDA kernels here"
        )
        return
    python = str(here.environment.python)
    for kind in ("memcheck", "racecheck"):
        # The allocator of torch would hide ends of tensors inside its large blocks.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **TEST_ENV}
        command = [tool, "--tool", kind, "--error-exitcode", "9", python, str(PROGRAMS / "kernels.py"), "run"]
        yield Program(f"{kind} of dsx_ops", command, env)


@dataclass(frozen=True)
class Stage:
    """What a verb runs, and for how long at most."""

    programs: Callable[[Here], Iterator[Program | Record]]
    limit_s: float


STAGES = {
    "versions": Stage(versions, 60),
    "build": Stage(build, 300),
    "parity": Stage(parity, 300),
    "syncs": Stage(syncs, 180),
    "tests": Stage(tests, 300),
    "speed": Stage(speed, 540),
    "memory": Stage(memory, 240),
    "largest": Stage(largest, 420),
    "sanitize": Stage(sanitize, 300),
}
