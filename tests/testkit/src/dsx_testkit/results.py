"""What a bench found: rows that are printed while they are measured, and one JSON file per table for docs/figures.

    from dsx_testkit.results import Table, add_json_option

    table = Table({"system": "", "ms per step": "{:.0f}", "loss": "{:.4f}"})
    table.add("dsx stage 2", 964.2, 5.7206)                              # prints the row
    table.goal("at least 1.2x DeepSpeed", "1.47x", met=True)
    table.save(options.json)                                             # prints the goals; writes, if there is a file

The idea: the numbers lie in the file, each column says how its numbers are shown, and the file says with which command,
when, on which machine, with which versions and from which commit they were made. `tools/dev.py figures` puts the tables
into the pages, so that no figure is copied by hand. Standard library only.

Left out: several runs in one file. Whoever compares runs writes a bench that repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["FiguresError", "Record", "Table", "add_json_option"]

Cell = str | int | float | bool | None
PEERS = ("torch", "deepspeed", "transformers", "accelerate", "numpy")
"""Distributions whose versions are recorded where they are installed."""


class FiguresError(ValueError):
    """A file of figures cannot be used. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Record:
    """One table with all that is known about its making; a file in docs/figures holds one.

    columns: by the title of a column how its numbers are shown, a template of `str.format` such as "{:.2f}x"; "" shows
        them as they are. Text and empty cells are shown as they are under every template.
    rows: cells by column; a column that is missing is an empty cell.
    goals: each {"goal": text, "measured": text or None, "met": true, false or None}.
    """

    bench: str
    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    columns: dict[str, str]
    rows: list[dict[str, Cell]]
    goals: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a file. Raises FiguresError where something is missing, unknown or of no column."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise FiguresError(f"{path.name}: {error}; a bench writes such a file with --json") from error
        names = {f.name for f in fields(cls)}
        if not isinstance(found, dict) or found.keys() != names:
            got = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise FiguresError(f"{path.name}: got the keys {got}, expected {sorted(names)}")
        record = cls(**found)
        strange = sorted({key for row in record.rows for key in row} - record.columns.keys())
        if strange:
            raise FiguresError(f"{path.name}: cells of unknown columns {strange}; there are {list(record.columns)}")
        return record

    def dump(self) -> str:
        """The text of the file: a row is a line, so that two runs can be compared line by line."""
        parts = []
        for key, value in asdict(self).items():
            if isinstance(value, list) and value:
                lines = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
                parts.append(f' "{key}": [\n  {lines}\n ]')
            else:
                parts.append(f' "{key}": {json.dumps(value, ensure_ascii=False)}')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def cells(self, row: Mapping[str, Cell]) -> list[str]:
        """The cells of a row as they are shown."""
        return [shown(row.get(name), template) for name, template in self.columns.items()]

    def table(self) -> str:
        """The rows in Markdown."""
        rows = [[cell.replace("|", "\\|") for cell in self.cells(row)] for row in self.rows]
        lines = [self.columns, ["---"] * len(self.columns), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def caption(self) -> str:
        """How the table was made, and its goals, in Markdown."""
        machine = self.machine
        parts = [f"{machine['cores']} cores of {machine['cpu']}", f"{machine['memory']}", f"Linux {machine['kernel']}"]
        parts += [machine["gpu"]] if machine.get("gpu") else []
        parts += [f"{name} {version}" for name, version in self.versions.items()]
        made = f"Made by `{self.command}` on {self.date}: {', '.join(parts)}; commit {self.commit}."
        goals = "\n".join(f"- {goal_line(goal)}" for goal in self.goals)
        return f"{made}\n\n{goals}" if goals else made


def shown(cell: Cell, template: str) -> str:
    """A cell as text; `template` is for numbers."""
    if cell is None:
        return ""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return (template or "{}").format(cell)
    return str(cell)


def goal_line(goal: Mapping[str, Any]) -> str:
    """A goal with what was measured and the verdict, as a line of a page."""
    verdict = {True: "met", False: "missed", None: ""}[goal["met"]]
    found = ", ".join(part for part in (goal["measured"], verdict) if part)
    return f"Goal: {goal['goal']}{': ' + found if found else ''}."


class Table:
    """A table under way: prints each row as it comes, and keeps it for `save`.

    Args:
        columns: by the title of a column how its numbers are shown, e.g. "{:.2f}x"; "" as they are.
        name: what tells this table from others of the same bench; part of the name of its file.
    """

    def __init__(self, columns: Mapping[str, str], name: str = "") -> None:
        self.columns, self.name = dict(columns), name
        self.rows: list[dict[str, Cell]] = []
        self.goals: list[dict[str, Any]] = []

    def add(self, *cells: Cell) -> None:
        """One row, with a cell for each of the first columns. Raises ValueError for more cells than columns."""
        if len(cells) > len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells, expected at most {len(self.columns)}")
        if not self.rows:
            sys.stdout.write(f"\nmade by: {command(sys.argv)}\n\n")
            sys.stdout.write(f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}\n")
        row: dict[str, Cell] = {}
        row.update((name, cell) for name, cell in zip(self.columns, cells) if cell not in (None, ""))
        self.rows.append(row)
        text = [shown(row.get(name), template) for name, template in self.columns.items()]
        sys.stdout.write(f"| {' | '.join(text)} |\n")
        sys.stdout.flush()

    def goal(self, text: str, measured: str | None = None, *, met: bool | None = None) -> None:
        """What was wanted, what was found, and whether that is enough. `save` prints it, below all rows."""
        self.goals.append({"goal": text, "measured": measured, "met": met})

    def record(self, words: Sequence[str] | None = None) -> Record:
        """The table with what is known of this process, machine and checkout; `words`: the script and its arguments, by
        default those of this process.
        """
        words = words or sys.argv
        day, found = time.strftime("%Y-%m-%d"), (machine(), versions(), commit(words))
        return Record(script(words), command(words), day, *found, self.columns, self.rows, self.goals)

    def save(self, path: str | os.PathLike[str] | None) -> None:
        """Print the goals, and write the file. A named table goes to a file of the same stem, "-" and its name.

        Args:
            path: of the file; None: nothing is written.
        """
        sys.stdout.write("".join(["\n", *(f"- {goal_line(goal)}\n" for goal in self.goals)]))
        sys.stdout.flush()
        if path is not None:
            target = Path(path)
            if self.name:
                target = target.with_name(f"{target.stem}-{self.name}{target.suffix}")
            target.write_text(self.record().dump(), encoding="utf-8")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option `--json FILE` that all benches have."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the table there, for docs/figures; several tables go to FILE with their names before the end",
    )


def checkout(words: Sequence[str]) -> Path | None:
    """The root of the repository that the script `words[0]` lies in."""
    here = Path(words[0]).resolve()
    return next((parent for parent in here.parents if (parent / "tools" / "dev.py").is_file()), None)


def script(words: Sequence[str]) -> str:
    """The path of the script `words[0]` from the root of the repository; its name if it lies in none."""
    path, root = Path(words[0]).resolve(), checkout(words)
    return path.relative_to(root).as_posix() if root else path.name


def command(words: Sequence[str]) -> str:
    """The command line of `words` as one would type it: from the root of the repository, without `--json`, and with
    PATH for what lies on this machine only.
    """
    kept, skip = [], False
    for word in words[1:]:
        if skip or word.startswith("--json="):
            skip = False
        elif word == "--json":
            skip = True
        else:
            kept.append("PATH" if os.path.isabs(word) else word)
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    return shlex.join([*launcher.split(), script(words), *kept])


def machine() -> dict[str, Any]:
    """Processor with its vectors, cores, memory, kernel, and a GPU if this process has used one."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if os.path.exists("/proc/cpuinfo") else ""
    name = re.search(r"^model name\s*: (.+)$", info, re.M)
    wide = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in info.split()), "")
    cpu = name[1].strip() if name else platform.machine()
    kernel = re.match(r"\d+(\.\d+)*", platform.release())
    found = {
        "cpu": f"{cpu} ({wide})" if wide else cpu,
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": kernel[0] if kernel else platform.release(),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Versions of torch and of the peers that are installed. dsx-compat's entry by the name of a peer is none."""
    found = {}
    for name in PEERS:
        try:
            peer = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if not (peer.metadata["Summary"] or "").startswith("Not "):
            found[name] = peer.version.split("+")[0]
    return found


def commit(words: Sequence[str]) -> str:
    """The commit of the checkout, and whether its code has been changed since; "not recorded" without git."""
    root = checkout(words)
    if root is None:
        return "not recorded"

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--", "packages", "tests/testkit").strip()
    except (OSError, subprocess.CalledProcessError):
        return "not recorded"
    return f"{head}, with changes" if changed else head
