"""``dsx launch``: start a program on every device of one or many machines.

Exit codes: 0; that of the failed rank; 2 for a mistake in the command; 1 if hosts cannot be reached.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from dsx_core import CodedError

from .errors import ResourceError
from .logs import configure_logging
from .options import LaunchOptions, parse

SEARCHES = "dsx_launch.searches"
"""Group of entry points: functions of (options, launch) that start the job several times and return an exit code."""


@contextmanager
def pid_file() -> Iterator[None]:
    """A file ``<temporary folder>/<pid>.dsx`` with the process id, for programs that start the launcher."""
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.dsx")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{os.getpid()}\n")
    try:
        yield
    finally:
        os.unlink(path)


def launch(options: LaunchOptions) -> int:
    """Start the job and wait for its end. Returns the exit code. Raises `ResourceError` and `LaunchError`; with a
    search also `AutotuningError` and `DsxConfigError`.
    """
    if options.autotuning:
        return _search(options)
    from .plan import HostsPlan, make_plan

    plan = make_plan(options, os.environ)
    if options.dry_run:
        sys.stdout.write(describe(plan))
        return 0
    with pid_file() if options.save_pid else nullcontext():
        if isinstance(plan, HostsPlan):
            from .connections import check_connections
            from .elastic_hosts import run_elastic_hosts
            from .hosts import run_hosts

            if not options.no_ssh_check:
                check_connections(plan.remote.hosts, plan.launcher, options, os.environ)
            if options.elastic_training:
                return run_elastic_hosts(plan, os.environ)
            return run_hosts(plan, os.environ, options.restarts or 0)
        from .elastic import run_elastic_host
        from .host import run_host
        from .plan import elastic_of

        if options.elastic_training:
            return run_elastic_host(plan, elastic_of(options, len(plan.hosts)))
        return run_host(plan, options.restarts or 0)


def _search(options: LaunchOptions) -> int:
    """Let the installed autotuner start the job several times. It registers itself as an entry point, because it needs
    the engine, which this package does not.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=SEARCHES))
    if not found:
        raise ResourceError(
            "--autotuning: no autotuner is installed; install dsx, which has one (docs/start/install.md)"
        )
    return found[0].load()(options, launch)


def describe(plan: object) -> str:
    """The commands that would be started, one per line."""
    from .host import WORKER, HostJob
    from .plan import HostsPlan

    if isinstance(plan, HostsPlan):
        return "".join(f"{command.shell_text()}\n" for command in plan.commands)
    if not isinstance(plan, HostJob):
        raise TypeError(f"got {type(plan).__name__}, expected a plan")
    import shlex

    lines = []
    for local_rank in range(plan.procs):
        settings = {"LOCAL_RANK": str(local_rank), "LOCAL_SIZE": str(plan.procs), "CROSS_RANK": str(plan.host_rank)}
        if plan.devices is not None:
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices)
        ranked = [f"--local_rank={local_rank}"] if plan.program.pass_local_rank else []
        argv = [sys.executable, "-u", str(WORKER), plan.program.target, *ranked, *plan.program.args]
        lines.append(" ".join([*(f"{name}={value}" for name, value in settings.items()), shlex.join(argv)]))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx launch") -> int:
    """Run the command line. Mistakes are printed without a traceback."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv, prog=prog)
        configure_logging("error" if options.quiet else options.log_level)
        return launch(options)
    except KeyboardInterrupt:  # while torch is imported: nothing has been started yet
        return 128 + signal.SIGINT
    except CodedError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2 if isinstance(error, ValueError) else 1  # a mistake in the command, or something that went wrong
