"""Where the launcher's own messages go: stderr, with a mark, from one logger."""

import logging


def configure_logging(level: str) -> None:
    """Let the launcher's logger write to stderr; the root logger is the program's business."""
    log = logging.getLogger("dsx.launcher")
    log.setLevel(level.upper())
    log.propagate = False
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dsx] %(message)s"))
        log.addHandler(handler)
