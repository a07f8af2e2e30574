"""Slurm: srun inside an allocation, one task per host. Variables are passed in srun's own environment, so values may
contain commas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import ResourceError
from .base import HOSTS_FILE, Command, Remote, agent_argv, naming_hosts

_GROUP = re.compile(r"^(?P<prefix>[^\[\]]*)\[(?P<ranges>[^\[\]]+)\](?P<rest>.*)$")


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """One srun. Each task gets all allocated cores of its host; by default srun would give it one core."""
    count = str(len(remote.hosts))
    hosts, file = naming_hosts(remote.hosts, "--nodelist", f"--nodelist {HOSTS_FILE}")  # a word with "/" is a file
    tasks = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", *hosts]
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    if cores.isdecimal():
        tasks += ["--cpus-per-task", cores]
    options = (*tasks, "--kill-on-bad-exit=1", "--export=ALL", f"--chdir={remote.cwd}")
    return [
        Command(
            ("srun", *options, *remote.launcher_args, *agent_argv(remote, "--rank_from=slurm")),
            env=dict(remote.exports),
            hosts_file=file,
        )
    ]


def expand_nodelist(text: str) -> tuple[str, ...]:
    """``"gpu[01-03,7],login"`` -> ``("gpu01", "gpu02", "gpu03", "gpu7", "login")``, the hosts of an allocation in
    Slurm's order.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts.extend(_expand(part))
    if not hosts:
        raise ResourceError(f"the Slurm node list {text!r} names no host; run inside an allocation or pass --hostfile")
    return tuple(hosts)


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _expand(part: str) -> list[str]:
    match = _GROUP.match(part)
    if match is None:
        return [part]
    numbers: list[str] = []
    for item in match["ranges"].split(","):
        low, dash, high = item.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ResourceError(f"the Slurm node list has {item!r} in {part!r}; expected a number or a range")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return [f"{match['prefix']}{number}{rest}" for number in numbers for rest in _expand(match["rest"])]
