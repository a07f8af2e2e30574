"""Extensions: objects that an engine is given, which take part in building it.

An extension belongs to a section of the configuration. `dsx.initialize(extensions=[...])` takes them; others come with
packages that are installed, through entry points of the group `dsx.extensions`. The name of such an entry point is the
section, and the extension is made only for a configuration that has this section.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import nn

from .config import Config
from .watching import Watch, Watched

__all__ = ["EXTENSIONS", "Extension", "installed_extensions"]

EXTENSIONS = "dsx.extensions"
"""Group of entry points: functions without arguments that return an `Extension`; the name is that of a section."""


class Extension(Protocol):
    """Takes part in building an engine. The methods are called once each, in this order, on every rank."""

    def begin(self, keys: Mapping[str, Any], model: nn.Module, rank: int) -> None:
        """Look at the model as the caller gave it.

        Args:
            keys: of the whole configuration, as they were written; they are not checked yet.
            model: before the configuration changes it.
            rank: of this process.
        """
        ...

    def configured(self, config: Config) -> None:
        """The configuration is right. The ranks have not joined yet."""
        ...

    def join(self, watch: Watch, to: Watched) -> None:
        """Add hooks and observers to the engine. They are called after the engine's own."""
        ...


def installed_extensions(keys: Mapping[str, Any]) -> list[Extension]:
    """New extensions of installed packages for the sections that a configuration has, by name of the section."""
    found = {one.name: one for one in entry_points(group=EXTENSIONS)}
    return [found[name].load()() for name in sorted(found) if keys.get(name) is not None]
