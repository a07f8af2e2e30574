"""The choice of the `deepspeed` that a process gets: the folder of our package, `activate()`, and a search for others.

The package and its metadata are in a separate folder (`_site`), not in site-packages. A line in `dsx_compat.pth`
puts that folder at the end of `sys.path`. So files of the real DeepSpeed are never mixed with ours. If the real one is
installed, it comes first. `activate()` puts the folder at the beginning of `sys.path`, for one process
(docs/decisions/0028-deepspeed-by-a-folder.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ._version import DEEPSPEED_VERSION
from .errors import WrongDeepSpeedError

__all__ = ["SITE", "OtherDeepSpeed", "activate", "has_metadata", "loaded_from", "mixed_files", "on_path", "others"]

SITE = Path(__file__).resolve().parent / "_site"


@dataclass(frozen=True)
class OtherDeepSpeed:
    """A `deepspeed` that is not ours.

    Attributes:
        place: the folder on `sys.path` that holds it.
        version: version in its metadata; empty for files without metadata.
        precedes: whether `import deepspeed` finds it before ours.
    """

    place: Path
    version: str
    precedes: bool

    def __str__(self) -> str:
        return f"deepspeed {self.version or '(leftover files)'} in {self.place}"


def activate() -> None:
    """Make `import deepspeed` import the package of dsx, in this process only.

    Each process has to call it. `accelerate launch` and `torchrun` start new processes, so call it at the top of the
    script. A second call changes nothing.

    Raises:
        WrongDeepSpeedError: another `deepspeed` was imported already.
    """
    place = loaded_from()
    if place is not None and place != SITE:
        raise WrongDeepSpeedError(
            f"activate(): got a process that has imported deepspeed from {place}, expected none; call"
            " dsx_compat.activate() before the first import of deepspeed, transformers or accelerate"
        )
    sys.path[:] = [str(SITE), *(entry for entry in sys.path if entry != str(SITE))]
    _forget_failed_import("deepspeed")


def _forget_failed_import(name: str) -> None:
    """Clear what Python remembers of a failed import: caches of importers, and None in `sys.modules`."""
    import importlib

    importlib.invalidate_caches()
    if name in sys.modules and sys.modules[name] is None:
        del sys.modules[name]


def loaded_from() -> Path | None:
    """The folder that holds the imported `deepspeed`; None if none is imported."""
    module = sys.modules.get("deepspeed")
    found = getattr(module, "__file__", None)
    return None if found is None else Path(found).resolve().parent.parent


def others() -> list[OtherDeepSpeed]:
    """Every other `deepspeed` on `sys.path`, in the order of the path."""
    found: list[OtherDeepSpeed] = []
    ours_seen = False
    for place in _path_folders():
        if place == SITE:
            ours_seen = True
            continue
        versions = [d.version for d in metadata.distributions(name="deepspeed", path=[str(place)])]
        package = (place / "deepspeed" / "__init__.py").is_file()
        if versions or package:
            found.append(OtherDeepSpeed(place, versions[0] if versions else "", package and not ours_seen))
    return found


def on_path() -> bool:
    """Whether our folder is on `sys.path`: a new process can import our `deepspeed`."""
    return any(place == SITE for place in _path_folders())


def mixed_files() -> list[Path]:
    """Files in our folder that another distribution's RECORD claims: an installer has written over ours."""
    claimed = []
    for distribution in metadata.distributions(name="deepspeed"):
        if distribution.version == DEEPSPEED_VERSION and _is_ours(distribution):
            continue
        for file in distribution.files or ():
            path = Path(str(file.locate())).resolve()
            if SITE in path.parents and path.exists():
                claimed.append(path)
    return claimed


def has_metadata() -> bool:
    """Whether our folder still says which version it is: `pip uninstall deepspeed` removes that entry."""
    return any(SITE.glob("deepspeed-*.dist-info/METADATA"))


def _is_ours(distribution: metadata.Distribution) -> bool:
    return Path(str(distribution.locate_file(""))).resolve() == SITE


def _path_folders() -> Iterator[Path]:
    seen: set[Path] = set()
    for entry in sys.path:
        place = Path(entry or ".").resolve()
        if place not in seen and place.is_dir():
            seen.add(place)
            yield place
