"""Running a stage: programs in processes of their own, each with what is left of the stage's time, and their records.

A program writes one JSON line for each thing it has looked at, as soon as it knows (`programs/records.py`). So a stage
that ends early, or badly, keeps what it had found, and the next stage begins all the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `bad` is a real difference, and the only verdict that makes the command fail.
VERDICTS = ("good", "bad", "skipped", "noted", "incomplete")
TAIL = 6000  # characters of a program's output that are kept in the report
GRACE_S = 5.0  # for the stacks that a stopped program writes


@dataclass(frozen=True)
class Record:
    """One thing a stage has looked at: its name, what came of it, in words, and figures."""

    name: str
    verdict: str
    text: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict: got {self.verdict!r}, expected one of {', '.join(VERDICTS)}")


@dataclass(frozen=True)
class Program:
    """A command of a stage. `env` is added to the environment; `code_is_verdict`: an exit code is a difference itself,
    and needs no record that says so.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    good_codes: tuple[int, ...] = (0,)
    write_to: str = "DSX_GPU_RECORDS"


@dataclass
class Outcome:
    """A stage that was run."""

    stage: str
    limit_s: float
    seconds: float = 0.0
    records: list[Record] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst of its records: bad, incomplete, good, and skipped or noted where there is nothing else."""
        found = {record.verdict for record in self.records}
        return next((v for v in ("bad", "incomplete", "good", "noted", "skipped") if v in found), "skipped")


class Clock:
    """What is left of a stage's time."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def left(self) -> float:
        """Seconds, not below 0."""
        return max(0.0, self._end - time.monotonic())


def run_stage(
    name: str, programs: Iterable[Program | Record], limit_s: float, folder: Path, env: Mapping[str, str]
) -> Outcome:
    """Run the programs of a stage one after another; nothing that they do raises here.

    Args:
        programs: a `Record` among them is taken as it is (something is left out, and why). May be a generator, which is
            asked for the next when the one before has ended.
        folder: gets the records and the whole output of every program.
        env: the environment of the programs.
    """
    outcome, clock, began = Outcome(name, limit_s), Clock(limit_s), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for program in _guarded(name, programs, outcome):
        if isinstance(program, Record):
            outcome.records.append(program)
        elif clock.left() <= 0:
            outcome.records.append(
                Record(program.name, "incomplete", f"not begun: the stage's {limit_s:.0f} s are over")
            )
        else:
            outcome.records += _run(program, clock, folder, env)
    outcome.seconds = time.monotonic() - began
    return outcome


def _guarded(name: str, programs: Iterable[Program | Record], outcome: Outcome) -> Iterator[Program | Record]:
    """The programs; an error of the stage's own code becomes a record."""
    try:
        yield from programs
    except Exception as error:  # noqa: BLE001  whatever it is, it must not cost the stages that follow
        outcome.records.append(Record(name, "bad", f"the stage itself failed: {type(error).__name__}: {error}"))


def _run(program: Program, clock: Clock, folder: Path, env: Mapping[str, str]) -> list[Record]:
    """The records of one program, and one more where it ended otherwise than it should."""
    stem = "".join(c if c.isalnum() else "-" for c in program.name)
    lines, log = folder / f"{stem}.jsonl", folder / f"{stem}.log"
    lines.unlink(missing_ok=True)
    variables = {**env, **program.env, program.write_to: str(lines), "PYTHONFAULTHANDLER": "1"}
    try:
        code = _call(program.command, variables, clock.left(), log)
    except OSError as error:
        return [Record(program.name, "skipped", f"cannot be started: {error}")]
    records = read_records(lines)
    if code is None:
        text = f"stopped at the stage's limit; {len(records)} records before; where it was:\n{_tail(log)}"
        return [*records, Record(program.name, "incomplete", text)]
    if code not in program.good_codes:
        return [*records, Record(program.name, "bad", f"ended with exit code {code}\n{_tail(log)}")]
    return records or [Record(program.name, "good")]


def _call(command: Sequence[str], variables: Mapping[str, str], seconds: float, log: Path) -> int | None:
    """The exit code; None where time ran out. The process then says where it was (SIGABRT under faulthandler), and it
    and all that it started are ended.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), env=dict(variables), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            with suppress(ProcessLookupError):  # its children too, also where it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_records(path: Path) -> list[Record]:
    """What a program wrote; a last line that is not whole (the process was ended) is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError):
            found.append(Record(**json.loads(line)))
    return found


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
