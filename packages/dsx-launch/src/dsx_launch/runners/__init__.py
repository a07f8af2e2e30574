"""Commands that start the agents of several hosts: one module per family of launchers, with pure functions from a
`Remote` to commands.

Every launcher starts exactly one process per host, ``python -m dsx_launch.node``, which starts the ranks of that
host. So the launchers need not know devices or ranks, the program does not load MPI, and the pinning of MPI launchers
(for one rank per core) is switched off.
"""

from collections.abc import Callable, Mapping

from . import mpich, openmpi, pdsh, slurm, ssh
from .base import Command, Remote

Build = Callable[[Remote, Mapping[str, str]], list[Command]]

BUILDERS: dict[str, Build] = {
    "ssh": ssh.commands,
    "pdsh": pdsh.commands,
    "openmpi": openmpi.commands,
    "mpich": mpich.commands,
    "impi": mpich.commands_impi,
    "mvapich": mpich.commands_mvapich,
    "slurm": slurm.commands,
}

PROGRAMS = {
    "ssh": "ssh",
    "pdsh": "pdsh",
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "impi": "mpirun",
    "mvapich": "mpirun",
    "slurm": "srun",
}

__all__ = ["BUILDERS", "PROGRAMS", "Build", "Command", "Remote"]
