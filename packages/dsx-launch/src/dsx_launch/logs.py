"""The launcher's own messages: they go to stderr, with a prefix, from one logger."""

import logging
import os


def configure_logging(level: str) -> None:
    """Let the launcher's logger write to stderr; the root logger is left to the program."""
    log = logging.getLogger("dsx.launcher")
    log.setLevel(level.upper())
    log.propagate = False
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dsx] %(message)s"))
        log.addHandler(handler)


def import_torch_quietly() -> None:
    """Import torch with its C++ warnings off in this process (not in the ranks). Otherwise a store that another host
    has left prints long stack traces.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        return
    os.environ[name] = "ERROR"  # read once, by the import
    import torch.distributed  # noqa: F401 - late: seconds

    del os.environ[name]
