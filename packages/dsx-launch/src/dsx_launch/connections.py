"""Asks single hosts over ssh before the job: whether each can be reached, and the address of the first one."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence

from .errors import LaunchError
from .options import LaunchOptions
from .runners.ssh import client

SSH_CHECK_S = 20.0


def _ssh_client(options: LaunchOptions, launcher: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    text = options.launcher_args if launcher == "ssh" else environ.get("PDSH_SSH_ARGS_APPEND", "")
    return client(tuple(shlex.split(text)), options.ssh_port)


def ask_address(host: str, options: LaunchOptions, environ: Mapping[str, str]) -> str:
    """The first address ``host`` reports for itself over ssh."""
    argv = (*_ssh_client(options, options.launcher or "ssh", environ), host, "hostname -I")
    try:
        answer = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"host {host} did not tell its address within {SSH_CHECK_S:.0f} s; pass --master_addr"
        ) from error
    words = answer.stdout.split()
    if answer.returncode != 0 or not words:
        raise LaunchError(
            f"host {host} did not tell its address ({answer.stderr.strip() or 'no output'}); pass --master_addr"
        )
    return words[0]


def check_connections(hosts: Sequence[str], launcher: str, options: LaunchOptions, environ: Mapping[str, str]) -> None:
    """Try all hosts over ssh at the same time. Raises `LaunchError` with the names of hosts that cannot be reached
    without a password.
    """
    if launcher not in ("ssh", "pdsh") or environ.get("PDSH_RCMD_TYPE", "ssh") != "ssh":
        return
    start = _ssh_client(options, launcher, environ)
    tries = [
        (
            host,
            subprocess.Popen(
                (*start, host, "true"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ),
        )
        for host in hosts
    ]
    deadline = time.monotonic() + SSH_CHECK_S
    problems = [problem for host, process in tries if (problem := _problem(host, process, deadline))]
    if problems:
        raise LaunchError(
            "; ".join(problems) + ". Every host must accept ssh without a password (--no_ssh_check skips this test)"
        )


def _problem(host: str, process: subprocess.Popen[str], deadline: float) -> str:
    try:
        _, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"host {host}: no answer within {SSH_CHECK_S:.0f} s"
    return "" if process.returncode == 0 else f"host {host}: {said.strip() or f'ssh ended with {process.returncode}'}"
