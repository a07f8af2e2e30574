"""`dsx-verify`: audit a training step of any system beside plain torch, replay public bugs, explain dumps of hangs."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsx_core import CommandParser, run_program

from ._version import __version__
from .auditing import audit
from .errors import AuditError
from .flight import explain_dumps, read_dumps
from .museum import EXHIBITS, visit
from .receipt import Receipt

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-verify") -> int:
    """Run the command. Returns 0 if nothing is wrong, 1 if something differs, 2 for a wrong question."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program(lambda: _run(words, prog))


def _run(words: Sequence[str], prog: str) -> int:
    commands = {"museum": _museum, "hang": _hang}
    try:
        if words and words[0] in commands:
            return commands[words[0]](words[1:], f"{prog} {words[0]}")
        return _audit(words, prog)
    except AuditError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 2


def _audit(words: Sequence[str], prog: str) -> int:
    parser = CommandParser(
        prog=prog,
        version=f"dsx-verify {__version__}",
        description="Audit the training step of a script beside plain torch. The script defines `audited()`, which"
        f" returns the arguments of dsx_verify.audit as a dict. Other commands: {prog} museum, {prog} hang DUMPS.",
    )
    parser.add_argument("script", help="the script; it is run on each rank")
    parser.add_argument("--ranks", type=int, default=1, help="processes to start (default 1)")
    parser.add_argument("--steps", type=int, default=3, help="updates to compare (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the receipt as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the receipt as a page")
    options = parser.parse_args(words)
    if options.ranks < 1 or options.steps < 1:
        raise AuditError(f"--ranks {options.ranks} --steps {options.steps}: expected numbers of at least 1")
    if not Path(options.script).is_file():
        raise AuditError(f"{options.script}: there is no such script")
    if options.ranks > 1 and "RANK" not in os.environ:
        return _on_ranks(options.ranks, ["-m", "dsx_verify", *words])
    return _here(options)


def _here(options: argparse.Namespace) -> int:
    """Audit in this process, which is one of the ranks."""
    _join()
    defined: dict[str, Any] = runpy.run_path(options.script, run_name="dsx_verify_script")
    make = defined.get("audited")
    if make is None:
        raise AuditError(f"{options.script}: it defines no function `audited` that returns the arguments of an audit")
    arguments = {"steps": options.steps, **make()}
    step, model = arguments.pop("step"), arguments.pop("model")
    receipt: Receipt = audit(step, model, raise_error=False, **arguments)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(receipt)  # noqa: T201 - a command
        for path in filter(None, (options.json, options.html)):
            receipt.write(path)
    _leave()
    return 0 if receipt.ok else 1


def _museum(words: Sequence[str], prog: str) -> int:
    parser = CommandParser(prog=prog, description="Audit public bugs of 2025 and 2026.")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only those that need so many ranks")
    options = parser.parse_args(words)
    if options.ranks is None:
        return max(_museum(["--ranks", "1"], prog), _museum(["--ranks", "2"], prog))
    if options.ranks > 1 and "RANK" not in os.environ:
        return _on_ranks(options.ranks, ["-m", "dsx_verify", "museum", "--ranks", str(options.ranks)])
    _join()
    wrong = 0
    for exhibit in (e for e in EXHIBITS if e.ranks == options.ranks):
        broken, right = visit(exhibit), visit(exhibit, broken=False)
        named = broken.fault.kind if broken.fault is not None else "nothing"
        wrong += named != exhibit.kind or not right.ok
        if not dist.is_initialized() or dist.get_rank() == 0:
            alarm = "" if right.ok else "; ITS RIGHT FORM IS CALLED WRONG"
            print(f"{exhibit.thread:36} {exhibit.says}: {named}{alarm}", flush=True)  # noqa: T201 - a command
    _leave()
    return 1 if wrong else 0


def _hang(words: Sequence[str], prog: str) -> int:
    parser = CommandParser(
        prog=prog, description="Explain a hang from dumps of torch's flight recorder, one file a rank."
    )
    parser.add_argument("dumps", nargs="+", help="files whose names end with the rank")
    hang = explain_dumps(read_dumps(parser.parse_args(words).dumps))
    print("no rank waits for a collective" if hang is None else hang)  # noqa: T201 - a command
    return 0 if hang is None else 1


def _on_ranks(count: int, words: list[str]) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [*launcher, *words], capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}
    )
    sys.stdout.write(done.stdout)
    if done.returncode and not done.stdout.strip():
        sys.stderr.write(done.stderr)
        return 2
    return 1 if done.returncode else 0


def _join() -> None:
    """Join the other ranks, where a launcher has started them."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
