"""Asks single hosts over ssh before the job: whether each can be reached, and the address of the first one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from .errors import LaunchError
from .options import LaunchOptions
from .runners.ssh import WINDOW, client

SSH_CHECK_S = 20.0  # for each host
SHOWN = 16  # problems of single hosts in the message


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
    """Try all hosts over ssh, `WINDOW` at the same time, each with a deadline of its own. When so many have failed, the
    rest is not tried. Raises `LaunchError` with the names of hosts that cannot be reached without a password.
    """
    if launcher not in ("ssh", "pdsh") or environ.get("PDSH_RCMD_TYPE", "ssh") != "ssh":
        return
    start = _ssh_client(options, launcher, environ)
    problems: dict[int, str] = {}
    pool = ThreadPoolExecutor(min(WINDOW, len(hosts)), thread_name_prefix="dsx-ssh-check")
    try:
        tries = {pool.submit(_problem, start, host): index for index, host in enumerate(hosts)}
        for done in as_completed(tries):
            if problem := done.result():
                problems[tries[done]] = problem
            if len(problems) == WINDOW:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    untried = sum(future.cancelled() for future in tries)
    if problems:
        raise LaunchError(
            f"{_listed([problems[index] for index in sorted(problems)], untried)}. Every host must accept ssh without"
            " a password (--no_ssh_check skips this test)"
        )


def _listed(problems: Sequence[str], untried: int) -> str:
    parts = list(problems[:SHOWN])
    if len(problems) > SHOWN:
        parts.append(f"{len(problems) - SHOWN} more hosts cannot be reached")
    if untried:
        parts.append(f"{untried} hosts were not tried")
    return "; ".join(parts)


def _problem(start: Sequence[str], host: str) -> str:
    try:
        answer = subprocess.run(
            (*start, host, "true"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=SSH_CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"host {host}: no answer within {SSH_CHECK_S:.0f} s"
    return (
        ""
        if answer.returncode == 0
        else f"host {host}: {answer.stderr.strip() or f'ssh ended with {answer.returncode}'}"
    )
