"""The errors of this package. Each says what was got, what was expected and what to do."""

from dsx_core import CodedError

__all__ = [
    "CollectiveTimeoutError",
    "CommAbortedError",
    "CommArgumentError",
    "CommError",
    "HangError",
    "MismatchError",
    "PeerLostError",
    "SymmetricMemoryError",
    "TopologyError",
]


class CommError(CodedError, RuntimeError):
    """Communication cannot be done as asked: not initialised, no such backend, a rank is missing."""


class CommArgumentError(ValueError):
    """An argument of a collective is wrong: shape, dtype, device, rank or group."""


class CommConfigError(ValueError):
    """A configuration value is wrong; `path` names it."""

    def __init__(self, path: str, problem: str):
        self.path = path
        super().__init__(f"{path}: {problem}")


class TopologyError(ValueError):
    """Axes, coordinates or ranks that do not fit together."""


class PeerLostError(CommError):
    """A rank's process ended while others waited for it; the message names it."""

    code = "DSX206"


class CollectiveTimeoutError(CommError):
    """Ranks did not come within the group's time limit; the message names them."""

    code = "DSX207"


class MismatchError(CommError):
    """Ranks called different collectives, or the same with different sizes, dtypes or operators; the message names
    each.
    """

    code = "DSX208"


class CommAbortedError(CommError):
    """The group was given up by another rank or by the hang explainer; the message says why."""


class SymmetricMemoryError(CommError):
    """Symmetric memory cannot be had, on all ranks of the group; the message names the first that failed."""


class HangError(CommError):
    """A call waited longer than the limit; the message says which ranks are missing and what each rank does.

    `ranks`: the global ranks that are missing, as far as it is known; other calls of the same group that fail
    afterwards have the same, also on the missing ranks.
    """

    code = "DSX207"

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks
