"""MVAPICH2, started by its Hydra mpirun."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Command, Remote
from .mpich import hydra


def commands(remote: Remote, environ: Mapping[str, str]) -> list[Command]:
    """MVAPICH pins each process to a core by default. That is switched off for the agents, unless the user has set it
    (exported as MV2*).
    """
    return [hydra(remote, {} if "MV2_ENABLE_AFFINITY" in environ else {"MV2_ENABLE_AFFINITY": "0"}, "-genvall")]
