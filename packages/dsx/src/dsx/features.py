"""The features of an engine, in the order in which they take part in building it.

The order matters. Experts, techniques of compression and layers in 8 bits are made before a pipeline makes units of its
layers. The groups of sequences are made before slices look for theirs. Layers that skip tokens are converted before
layers that are skipped. What measures a step is called before what shows the figures (`Lines`). Extensions of the
caller and of installed packages come last: a trial of the autotuner ends the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .clipping import LogitClipping
from .compressing import Compression
from .config.sections import installed
from .efficiency import Curriculum, DataSampling, LayerDrop, TokenDrop
from .engine.garbage import CollectBetweenSteps
from .experts import Experts
from .extension import Extension, Watch, Watched, named
from .float8 import Float8
from .pipelining import Pipelines
from .recomputing import Recomputing
from .sequences import Sequences
from .sparse import SparseAttention
from .watching import Curvature, Lines, Monitoring, Stragglers, Trace

__all__ = ["FEATURES", "all_extensions", "installed_extensions"]


class GarbageBetweenSteps(Extension):
    """The key `disable_python_gc`."""

    name = "disable_python_gc"

    def join(self, watch: Watch, to: Watched) -> None:
        """Collect garbage after each step only."""
        if to.config.use("disable_python_gc"):
            watch.add(CollectBetweenSteps())


FEATURES: tuple[type[Extension], ...] = (
    Experts,
    Compression,
    Float8,
    Sequences,
    Pipelines,
    SparseAttention,
    Monitoring,
    Stragglers,
    Trace,
    Curvature,
    Lines,
    Curriculum,
    TokenDrop,
    LayerDrop,
    DataSampling,
    LogitClipping,
    Recomputing,
    GarbageBetweenSteps,
)
"""The extensions that every engine has, in their order; each looks whether the configuration asks for it."""


def all_extensions(keys: Mapping[str, Any], given: Sequence[Extension]) -> list[Extension]:
    """The extensions of a new engine, in their order: dsx's own, those given, those of installed packages.

    Raises:
        EngineArgumentError: two have the same name.
    """
    extensions = [*(make() for make in FEATURES), *given, *installed_extensions(keys)]
    named(extensions)
    return extensions


def installed_extensions(keys: Mapping[str, Any]) -> list[Extension]:
    """New extensions of installed packages for the sections that a configuration has, by name of the section."""
    found = installed()
    return [found[name].load()() for name in sorted(found) if keys.get(name) is not None]
