"""Common to all launchers: the description of the remote job, a command, and the text that a login shell runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


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

    ``lifeline``: the remote agent watches its standard input and stops when it ends (see `dsx.launcher.node`).
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    lifeline: bool = False

    def shell_text(self) -> str:
        """The command as a person would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*settings, shlex.join(self.argv)])


def agent_argv(remote: Remote, *extra: str) -> tuple[str, ...]:
    """The agent as an argument vector. With a ``venv_script``, a shell sources it first and uses the python it
    provides.
    """
    arguments = ("-u", "-m", "dsx.launcher.node", *extra, *remote.agent_args)
    if not remote.venv_script:
        return (remote.python, *arguments)
    script = f". {shlex.quote(remote.venv_script)} && exec python {shlex.join(arguments)}"
    return ("bash", "-c", script)


def shell_script(remote: Remote, *extra: str) -> str:
    """One line for the login shell of a host, for any shell: change to the folder, set the variables, and exec the
    agent.
    """
    steps = [f"cd {shlex.quote(remote.cwd)}"]
    steps += [f"export {name}={shlex.quote(value)}" for name, value in remote.exports.items()]
    steps.append(f"exec {shlex.join(agent_argv(remote, *extra))}")
    return f"sh -c {shlex.quote(' && '.join(steps))}"
