#!/usr/bin/env python3
"""The workspace's commands; each does all of its own set-up and can be run again at any time.

    python3 tools/dev.py demo [...]       train, checkpoint, resume and report: the main job
    python3 tools/dev.py test [...]       import contracts and the whole test suite (arguments go to pytest)
    python3 tools/dev.py lint             ruff, import contracts, pyright
    python3 tools/dev.py docs [--serve]   the documentation site, built strictly into dist/site, or served
    python3 tools/dev.py figures [...]    the tables of docs/figures/*.json into the pages that show them
    python3 tools/dev.py bench [package]  the benches of one package, or of all, peers side by side
    python3 tools/dev.py alone PACKAGE    build, install and test one package by itself, with and without native code
    python3 tools/dev.py wheels [...]     manylinux wheels of all packages into build/wheels (--meta-name: another name)
    python3 tools/dev.py release [...]    build, check, install, test, sign and publish (--dry-run: all but the last)
    python3 tools/dev.py clients [...]    Accelerate, Trainer, peft, trl and Lightning on dsx (arguments go to pytest)
    python3 tools/dev.py gpu [STAGE ...]  everything that needs a GPU, in stages, with one report
    python3 tools/dev.py device [...]     dsx on the simulated CUDA device, all of the matrix (arguments go to pytest)

Standard library only: needs Python >= 3.10 and pip; a C++ compiler is optional.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from devenv import DevError, Environment, all_packages, ensure, say  # noqa: E402

QUIET = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
# Test ranks run one thread each, so that two of them share two cores without fighting.
TEST_ENV = {**QUIET, "OMP_NUM_THREADS": "1"}
# Parts of the suite that take long, the longest first; what is not named here runs behind them, by folder.
LONG_PARTS = ("packages/dsx-zero", "tests/integration", "tests/device", "packages/dsx-checkpoint", "packages/dsx-comm")
SHARES_OF_DSX = 4  # into which the tests of dsx are cut, which take as long as those of ten other packages
AT_ONCE = 2  # parts; each starts processes of its own, and tests of time limits fail on a crowded machine
TESTS_FAILED, NO_TESTS = 1, 5  # pytest's exit codes
RELEASE_TOOLS = ("twine>=6", "cyclonedx-bom>=6")  # checks metadata and uploads; writes the bill of materials
MOST_RUN_AGAIN = 5  # more failures than this have a cause in the code


def test(arguments: list[str]) -> int:
    """Import contracts, then pytest over everything (or over what `arguments` name)."""
    environment = ensure()
    say("import contracts")
    _lint_imports(environment)
    if arguments:
        say("tests")
        return environment.run("-m", "pytest", "-q", *arguments, env=TEST_ENV, check=False)
    if (os.cpu_count() or 1) < 2:
        return _pytest(environment, [("", ["packages", "tests"])])
    return _pytest(environment, [(f"{number:>2}| ", paths) for number, paths in enumerate(_parts(), 1)])


def _parts() -> list[list[str]]:
    """The suite in parts, each the arguments of one pytest. A free core takes the next one, so that the last ones
    should be short.
    """
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "packages/dsx/tests").glob("test_*.py"))
    of_dsx = [files[share::SHARES_OF_DSX] for share in range(SHARES_OF_DSX)]
    found = [path for root in ("packages", "tests") for path in sorted((ROOT / root).glob("[a-z]*"))]
    named = {*LONG_PARTS, "packages/dsx"}
    others = [name for path in found if path.is_dir() and (name := str(path.relative_to(ROOT))) not in named]
    return [[LONG_PARTS[0]], *of_dsx, *([name] for name in (*LONG_PARTS[1:], *others))]


def _pytest(environment: Environment, parts: list[tuple[str, list[str]]]) -> int:
    """Run the parts, two side by side; each line of one begins with its mark. Returns a code that failed, or 0.

    A few tests that failed are run once more when nothing else runs: two parts, and what else the machine does, can
    starve a test that waits for a process. What fails again is a failure; what passes is printed as unsteady.
    """
    say("tests" if len(parts) == 1 else f"tests, in {len(parts)} parts, {AT_ONCE} side by side")

    def cache(mark: str) -> list[str]:
        return ["-o", f"cache_dir=.cache/pytest-{mark.strip(' |') or '0'}"]

    def run(part: tuple[str, list[str]], *options: str) -> tuple[int, str]:
        mark, paths = part
        command = [str(environment.python), "-m", "pytest", "-q", *cache(mark), *options, *paths]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment.variables(TEST_ENV), **pipes) as process:
            last = ""
            for last in process.stdout or ():
                print(mark + last, end="", flush=True)
        return process.returncode, last

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda part: run(part, "--cache-clear"), parts))
    codes = [code for code, _ in results]
    failed = sum(_failures(last) for _, last in results)
    if set(codes) - {0, TESTS_FAILED} or not 0 < failed <= MOST_RUN_AGAIN:
        return next(filter(None, codes), 0)
    say(f"{failed} failed; they run once more, alone")
    again = [run(part, "--last-failed")[0] for part, code in zip(parts, codes) if code]
    if not any(again):
        say("UNSTEADY: the tests named FAILED above passed alone. Find out what they wait for")
    return next(filter(None, again), 0)


def _failures(last_line: str) -> int:
    """How many tests failed or had an error in their set-up, by the last line that pytest prints."""
    return sum(int(number) for number in re.findall(r"(\d+) (?:failed|errors?)\b", last_line))


def _lint_imports(environment: Environment) -> None:
    script = environment.python.parent / "lint-imports"
    if subprocess.call([str(script)], cwd=ROOT) != 0:
        raise DevError("an import crosses the layers; the lines above name it")


def lint(_: list[str]) -> int:
    """Style, import contracts, types."""
    environment = ensure()
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    pages = [str(path.relative_to(ROOT)) for folder in (".", "docs", "packages") for path in _pages(ROOT / folder)]
    environment.run("-m", "ruff", "format", "--check", "--config", "line-length = 88", *pages)
    environment.run("tools/format_native.py", "--check")
    _lint_imports(environment)
    environment.run("-m", "pyright")
    return 0


def _pages(folder: Path) -> list[Path]:
    """The pages in a folder: of the root and of packages the files that are read, of docs all."""
    pattern = {"docs": "**/*.md", "packages": "*/*.md"}.get(folder.name, "*.md")
    return sorted(folder.glob(pattern))


def docs(arguments: list[str]) -> int:
    """The site: `--serve` shows it at a local address and rebuilds on change."""
    command = "serve" if "--serve" in arguments else "build"
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    code = ensure().run("-m", "mkdocs", command, "-f", "tools/site/mkdocs.yml", env=quiet, check=False)
    if code == 0 and command == "build":
        say("built: dist/site/index.html (serve the folder, e.g. python3 -m http.server -d dist/site)")
    return code


def figures(arguments: list[str]) -> int:
    """`--check` changes nothing and fails where a page is not up to date."""
    return ensure().run("tools/figures.py", *arguments, check=False)


def demo(arguments: list[str]) -> int:
    """The main job, on whatever devices this machine has."""
    return ensure().run("packages/dsx/examples/demo.py", *arguments, env=QUIET, check=False)


def bench(arguments: list[str]) -> int:
    """`bench/*.py` of the named packages, in an environment that also has the peers."""
    names = arguments or [n for n, p in all_packages().items() if (p.path / "bench").is_dir()]
    unknown = [n for n in names if n not in all_packages()]
    if unknown:
        raise DevError(f"no package {unknown[0]!r}; there are {', '.join(all_packages())}")
    folders = [all_packages()[n].path / "bench" for n in names]
    peers = [
        line
        for folder in folders
        if (folder / "requirements.txt").is_file()
        for line in (folder / "requirements.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    environment = ensure()
    if peers:
        # Without dsx-compat, which is installed under the name of a peer.
        environment = ensure(".venvs/bench", without=("dsx-compat",))
        # Without build isolation a peer that imports torch while building finds ours; its native ops stay off.
        environment.pip("setuptools", "wheel")
        environment.pip("--no-build-isolation", *peers, env={"DS_BUILD_OPS": "0"})
    scripts = [s for folder in folders for s in sorted(folder.glob("*.py")) if not s.name.startswith("_")]
    if not scripts:
        raise DevError(f"no bench in {', '.join(map(str, folders))}")
    for script in scripts:
        say(str(script.relative_to(ROOT)))
        environment.run(str(script), env=QUIET)
    return 0


CLIENT_TESTS = (
    "packages/dsx/tests/test_lightning_strategy.py",
    "packages/dsx/tests/test_ray_train.py",
    "packages/dsx-compat/tests/test_accelerate_sizes.py",
    "tests/docs/test_qlora_page.py",
    "tests/integration/test_docs_code.py::test_python_runs_as_it_stands[trainers.md-0]",
)
"""Tests that are skipped where a client is not installed, beside those of `tests_clients`."""

CLIENT_ENVIRONMENTS = (
    ("clients", ("requirements.txt", "alone.txt"), CLIENT_TESTS),
    ("clients-older", ("older.txt", "older_alone.txt"), ("-k", "llamafactory")),
)
"""Name, requirements and what is run. A test whose client is in the second is skipped in the first."""


def clients(arguments: list[str]) -> int:
    """Programs of other projects with dsx and dsx-compat, in an environment of their own, from the package index."""
    folder = all_packages()["dsx-compat"].path / "tests_clients"
    reports, worst = [], 0
    for name, files, tests in CLIENT_ENVIRONMENTS:
        wanted, alone = (
            [line for line in (folder / file).read_text().splitlines() if line[:1] not in ("", "#")] for file in files
        )
        environment = ensure(f".venvs/{name}", extra=wanted)
        environment.pip("--no-deps", *alone)
        reports.append(str(ROOT / "build" / f"{name}.xml"))
        command = ["-m", "pytest", "-q", str(folder), *tests, f"--junit-xml={reports[-1]}", *arguments]
        code = environment.run(*command, env=TEST_ENV, check=False)
        if code not in (0, TESTS_FAILED, NO_TESTS):
            return code
        worst = max(worst, code if code != NO_TESTS else 0)
    if not arguments:  # a whole run: what passed and what did not stands on the page
        environment.run("tools/compatibility.py", "record", *reports)
    return worst


def device(arguments: list[str]) -> int:
    """Everything on the simulated CUDA device: the whole matrix in every mode, planted races, budgets of host waits.

    Each test starts processes of its own on the simulated device. The option only lets the tests with the marker run.
    """
    command = ["-m", "pytest", "-q", "-m", "simcuda", "--device", "simcuda", "tests/device", *arguments]
    return ensure().run(*command, env=TEST_ENV, check=False)


def alone(arguments: list[str]) -> int:
    """One package (or `all`) in a clean environment, from its own wheel."""
    if not arguments:
        raise DevError(f"which package? one of: all, {', '.join(all_packages())}")
    environment = ensure()
    for name in list(all_packages()) if arguments == ["all"] else arguments:
        code = environment.run(str(ROOT / "ci" / "alone.py"), name, check=False)
        if code != 0:
            return code
    return 0


def wheels(arguments: list[str]) -> int:
    """A folder of wheels that `pip install --no-index --find-links build/wheels dsx` takes; see ci/wheels.py."""
    return ensure().run(str(ROOT / "ci" / "wheels.py"), *arguments, check=False)


def release(arguments: list[str]) -> int:
    """Every stage of a release, in an environment that also has its tools; see ci/release.py."""
    environment = ensure(".venvs/release", extra=RELEASE_TOOLS)
    return environment.run(str(ROOT / "ci" / "release.py"), *arguments, check=False)


def gpu(arguments: list[str]) -> int:
    """The first hour on a GPU, in stages; see `tools/dev.py gpu --help`."""
    from gpu.command import gpu as run  # lazy import: no other verb needs it

    return run(arguments)


VERBS = {
    "demo": demo,
    "test": test,
    "lint": lint,
    "docs": docs,
    "figures": figures,
    "bench": bench,
    "alone": alone,
    "clients": clients,
    "device": device,
    "gpu": gpu,
    "wheels": wheels,
    "release": release,
}


def main() -> int:
    """Entry point; the exit code is that of what ran."""
    if sys.version_info < (3, 10):  # noqa: UP036  this file is what an older Python is pointed at first
        print(f"dsx needs Python >= 3.10; this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    known = parser.parse_args()
    os.chdir(ROOT)
    try:
        return VERBS[known.verb](known.rest)
    except DevError as error:
        print(f"[dev] {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
