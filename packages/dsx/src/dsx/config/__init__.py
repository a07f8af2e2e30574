"""The configuration of a training run: one JSON document, read strictly.

    from dsx.config import load_config

    config = load_config("dsx.json", world_size=8)
    config.steps_per_print, config.zero_optimization.stage
    print(config.explain())

``load_config`` takes a dictionary, a path, or base64 text; comments and trailing commas are allowed. Everything that is
wrong is reported at once in a ``DsxConfigError``. Keys, defaults and availability are listed in ``docs/config.md``,
which ``python -m dsx.config reference`` writes.

Importing this package loads neither pydantic nor torch; they are loaded with the first configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import DsxConfigError, Problem

if TYPE_CHECKING:
    from .base import Section
    from .model import Config

__all__ = ["Config", "DsxConfigError", "Problem", "Section", "load_config"]


def load_config(source: Any, *, world_size: int) -> Config:
    """Load a configuration.

    Args:
        source: dictionary, path of a JSON file (comments and trailing commas allowed), base64 text of JSON, or a
            ``Config``, which is completed again for ``world_size``.
        world_size: number of data-parallel ranks; the batch arithmetic needs it.

    Raises:
        DsxConfigError: with every problem found; the text is the same on every rank.
    """
    from .load import load_config as load  # lazy import: pydantic alone costs 80 ms at import

    return load(source, world_size=world_size)


def __getattr__(name: str) -> Any:
    if name == "Config":
        from .model import Config  # lazy import, as above

        return Config
    if name == "Section":
        from .base import Section  # lazy import, as above

        return Section
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
