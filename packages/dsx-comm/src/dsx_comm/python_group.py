"""The base of process groups written in Python, with what torch asks of them: backend, rank and size, names.

torch keeps names and descriptions in C++ backends, which such a group has none of. The operations are the business of
the classes that derive from this one.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["PythonGroup"]


class PythonGroup(dist.ProcessGroup):
    """A process group without a C++ backend.

    Args:
        rank: of this process in the group.
        size: number of ranks.
        backend: the name that torch is told.
    """

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size, self._backend_name = rank, size, backend
        self._name, self._description = "", "undefined"

    def getBackendName(self) -> str:
        """The name of the backend."""
        return self._backend_name

    def _get_backend_name(self) -> str:
        return self._backend_name

    def rank(self) -> int:
        """This process' rank in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """The name under which torch knows the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """The description given when the group was made."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
