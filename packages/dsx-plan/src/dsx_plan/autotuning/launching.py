"""``dsx launch --autotuning tune|run``: lets the autotuner start the job of a command line several times.

Every experiment is a separate launcher in a separate process, so that experiments cannot influence each other. Ctrl-C
reaches only this process, which ends the running experiment in order. If this process is killed, the experiment ends
too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO

from dsx_launch.errors import ResourceError
from dsx_launch.host import HostJob, check_program
from dsx_launch.options import LaunchOptions, check_options, to_argv
from dsx_launch.plan import HostsPlan, make_plan, program_of
from dsx_launch.processes import dying_with_parent
from dsx_launch.resources import decode_world
from dsx_monitor.secrets import command_without_secrets

from .experiments import Job
from .search import Autotuner

__all__ = ["autotune"]

log = logging.getLogger("dsx.launcher")


def autotune(options: LaunchOptions, launch: Callable[[LaunchOptions], int]) -> int:
    """Search, and with `run` start the program with the result. Returns the exit code.

    Args:
        options: the options of the command line, with `autotuning` set.
        launch: starts a job without a search.

    Raises:
        ResourceError: the options cannot be combined with a search.
        AutotuningError: the search cannot begin, or no experiment works.
        DsxConfigError: the program's configuration is wrong.
    """
    if options.no_ssh:
        raise ResourceError(
            "--autotuning: got --no_ssh, expected one command that starts all hosts; use --launcher, or tune on one"
            " host"
        )
    check_program(program_of(options))
    plain = dataclasses.replace(options, autotuning="")
    tuner = Autotuner(options.script_args, lambda nodes, devices: _job(plain, launch, nodes, devices))
    if options.dry_run:
        sys.stdout.write(tuner.describe())
        return 0
    tuner.tune()
    tuner.print_tuning_results()
    return tuner.run_after_tuning() if options.autotuning == "run" else 0


def _job(options: LaunchOptions, launch: Callable[[LaunchOptions], int], nodes: int | None, devices: int | None) -> Job:
    """The job on the first `nodes` hosts and the first `devices` of each; None: as the command line says."""
    smaller = _on_part(options, nodes, devices)

    def start(args: Sequence[str], out: IO[bytes], err: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "dsx_launch", *to_argv(smaller, args)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=dying_with_parent(),
        )

    return Job(
        script=options.script,
        args=options.script_args,
        world_size=_ranks(smaller),
        start=start,
        run=lambda args: launch(dataclasses.replace(options, script_args=tuple(args))),
        shown=lambda args: shlex.join(command_without_secrets(["dsx", "launch", *to_argv(options, args)])),
        say=lambda text: log.info("%s", text),
    )


def _on_part(options: LaunchOptions, nodes: int | None, devices: int | None) -> LaunchOptions:
    """The options of an experiment: fewer hosts or devices, without the options that are only for the real run."""
    changed = dataclasses.replace(options, restarts=0, enable_each_rank_log="", save_pid=False, dry_run=False)
    if nodes is not None:
        changed = dataclasses.replace(changed, num_nodes=nodes)
    if devices is not None and options.num_procs is not None:
        changed = dataclasses.replace(changed, num_procs=devices)
    elif devices is not None:
        changed = dataclasses.replace(changed, num_gpus=devices)
    check_options(changed)
    return changed


def _ranks(options: LaunchOptions) -> int:
    plan = make_plan(dataclasses.replace(options, dry_run=True), os.environ)  # counting asks no host
    if isinstance(plan, HostJob):
        return plan.procs
    if not isinstance(plan, HostsPlan):
        raise TypeError(f"got {type(plan).__name__}, expected a plan")
    world = next(word for word in plan.remote.agent_args if word.startswith("--world_info="))
    return sum(len(slots) for slots in decode_world(world.partition("=")[2]).values())
