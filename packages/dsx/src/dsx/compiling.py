"""The `compile` section: compiles the engine's blocks when the engine is built, like `engine.compile()`."""

from __future__ import annotations

from typing import Any

from .config import Config
from .utils.logging import logger

__all__ = ["compile_as_configured"]


def compile_as_configured(engine: Any, config: Config) -> None:
    """Compile the engine's blocks, if the section is switched on."""
    section = config.use("compile")
    if not section.enabled:
        return
    options = dict(section.kwargs)
    engine.compile(**({} if section.backend is None else {"backend": section.backend}), compile_kwargs=options)
    logger.debug("compiled blocks with %s, %s", section.backend or "the default backend", options)
