"""Chooses the environment variables that are sent to the other hosts. Pure functions over mappings, except
`read_env_files`, which reads files.

Values may be secrets (MLFLOW_TRACKING_TOKEN). Every user of a host sees the command lines of its processes, so values
travel in the environment or on the standard input of what is started (`runners/`), and are masked where commands are
shown.

There are two sources: variables whose names start with one of `PREFIXES`, and ``KEY=VALUE`` files. The files are
``.dsx_env`` or ``.deepspeed_env`` in the home folder and then in the current folder, which takes precedence; or the one
file that ``DS_ENV_FILE`` names. If a file has another value for a variable that the user has set for this command
(``NCCL_DEBUG=INFO dsx launch ...``), the command's value is used and that is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ResourceError

log = logging.getLogger("dsx.launcher")

PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW")
FILE_NAMES = (".deepspeed_env", ".dsx_env")
PATH_VARIABLE = "DS_ENV_FILE"

MASK = "***"

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_SECRET_NAME = re.compile(
    r"TOKEN|PASSW|SECRET|CREDENTIAL|AUTH|(^|_)(API|ACCESS|PRIVATE)?KEY(_|$)|(^|_)PWD_", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a URL with a password


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like one that others should not read."""
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def shown(name: str, value: str) -> str:
    """The value as it may be printed."""
    return MASK if is_secret(name, value) else value


def parse_env_file(lines: Sequence[str], *, name: str) -> dict[str, str]:
    """Parse one ``KEY=VALUE`` per line; ``#`` at the start of a line begins a comment. Raises `ResourceError` with the
    line number for anything else.
    """
    values: dict[str, str] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not _NAME.match(key.strip()):
            raise ResourceError(f"{name}, line {number}: got {line!r}, expected KEY=VALUE")
        if "\0" in value:
            raise ResourceError(f"{name}, line {number}: {key.strip()} holds a NUL byte, which no variable can hold")
        values[key.strip()] = _unquoted(value.strip())
    return values


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def read_env_files(environ: Mapping[str, str], *, home: Path, here: Path) -> dict[str, str]:
    """The variables of the environment files; later files take precedence. A file named by ``DS_ENV_FILE`` must exist;
    other files may be missing.
    """
    named = environ.get(PATH_VARIABLE, "")
    if named and not Path(named).is_file():
        raise ResourceError(f"{PATH_VARIABLE}={named}: no such file; correct the variable or unset it")
    folders = [home] if home.resolve() == here.resolve() else [home, here]
    paths = [Path(named)] if named else [folder / name for folder in folders for name in FILE_NAMES]
    values: dict[str, str] = {}
    for path in paths:
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ResourceError(f"{path} cannot be read: {error}") from error
            values.update(parse_env_file(text.splitlines(), name=str(path)))
    return values


def exported(environ: Mapping[str, str], from_files: Mapping[str, str]) -> dict[str, str]:
    """The variables to set on every host, sorted by name."""
    chosen = {name: value for name, value in environ.items() if name.startswith(PREFIXES) and _NAME.match(name)}
    for name, value in from_files.items():
        if name in chosen and chosen[name] != value:
            log.warning(
                "%s: the environment says %r, the environment file %r; the environment is used",
                name,
                shown(name, chosen[name]),
                shown(name, value),
            )
        chosen.setdefault(name, value)
    return dict(sorted(chosen.items()))
