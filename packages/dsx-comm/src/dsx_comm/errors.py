"""The errors of this package. Each says what was got, what was expected and what to do."""


class CommError(RuntimeError):
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
