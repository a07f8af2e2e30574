"""Common to all launchers: the description of the remote job, a command, and the text that a login shell runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..environment import shown
from ..errors import ResourceError

MOST_ARGUMENT = 131_072
"""The bytes that Linux allows in one argument or variable of a process, with the zero byte at its end."""

HOSTS_FILE = "HOSTS_FILE"
"""Stands in a command for the path of the file with `Command.hosts_file`."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A job for several hosts. ``argv`` is the agent's command without the host's rank; ``exports`` are set in the
    environment of every host.
    """

    hosts: tuple[str, ...]
    python: str
    agent_args: tuple[str, ...]
    cwd: str
    exports: Mapping[str, str] = field(default_factory=dict)
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    venv_script: str = ""


@dataclass(frozen=True)
class Command:
    """One process to start on this machine: ``env`` is added to this process's environment; ``host`` is set if the
    command is for one host.

    ``lifeline``: the remote agent watches its standard input and stops when it ends (see `dsx_launch.node`).
    ``exports``: variables that are written to its standard input at the start, as `statements` has them.
    ``hosts_file``: text of a file that exists as long as the process; `HOSTS_FILE` in a word of ``argv`` is its path.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    lifeline: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)
    hosts_file: str = ""

    def shell_text(self) -> str:
        """The command as a person would type it, without secrets."""
        settings = [f"{name}={shlex.quote(shown(name, value))}" for name, value in self.env.items()]
        text = " ".join([*settings, shlex.join(self.argv)])
        if self.hosts_file:
            text += f"  # {HOSTS_FILE} has {len(self.hosts_file.splitlines())} hosts"
        told = {name: shown(name, value) for name, value in self.exports.items()}
        return f"{text}  # standard input: {statements(told)}" if told else text


def agent_argv(remote: Remote, *extra: str) -> tuple[str, ...]:
    """The agent as an argument vector. With a ``venv_script``, a shell sources it first and uses the python it
    provides.
    """
    arguments = ("-u", "-m", "dsx_launch.node", *extra, *remote.agent_args)
    if not remote.venv_script:
        return (remote.python, *arguments)
    script = f". {shlex.quote(remote.venv_script)} && exec python {shlex.join(arguments)}"
    return ("bash", "-c", script)


def naming_hosts(
    hosts: Sequence[str], option: str, file_option: str, *, of_one: str = "", in_file: str = ""
) -> tuple[tuple[str, ...], str]:
    """The words that name the hosts to a client, and the text of its `HOSTS_FILE`: none, unless the names are too long
    for one argument.

    Args:
        option: takes the names with commas between them; ``file_option`` takes `HOSTS_FILE`, after a space or within.
        of_one, in_file: what stands behind each name in an argument, and in a line of the file.
    """
    names = ",".join(host + of_one for host in hosts)
    if len(os.fsencode(names)) < MOST_ARGUMENT:
        return (option, names), ""
    return tuple(file_option.split()), "".join(f"{host}{in_file}\n" for host in hosts)


def check_arguments(command: Command, launcher: str, hosts: int) -> None:
    """Refuse a command that the kernel would not start, before anything is started.

    Raises:
        ResourceError: an argument or a variable is too long. Says what it begins with, and what to do.
    """
    words = [*command.argv, *(f"{name}={value}" for name, value in command.env.items())]
    longest = max(words, key=lambda word: len(os.fsencode(word)))
    size = len(os.fsencode(longest)) + 1
    if size > MOST_ARGUMENT:
        raise ResourceError(
            f"--launcher {launcher}, {hosts} hosts: one argument ({longest[:24]!r}...) has {size} bytes, and Linux"
            f" allows {MOST_ARGUMENT}; use shorter host names or variables, or start `dsx launch --no_ssh` with the"
            " same --hostfile on every host (srun, mpirun)"
        )


def statements(variables: Mapping[str, str]) -> str:
    """Commands for a shell that set these variables."""
    return " && ".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def shell_script(remote: Remote, *extra: str, from_stdin: bool) -> str:
    """One line for the login shell of a host, for any shell: change to the folder, set the variables, and exec the
    agent. `from_stdin`: the variables come as `statements` on the standard input, which the agent gets behind them.
    """
    steps = [f"cd {shlex.quote(remote.cwd)}"]
    text = statements(remote.exports)
    if text and from_stdin:
        steps.append(f'eval "$(head -c {len(os.fsencode(text))})"')
    elif text:
        steps.append(text)
    steps.append(f"exec {shlex.join(agent_argv(remote, *extra))}")
    return f"sh -c {shlex.quote(' && '.join(steps))}"
