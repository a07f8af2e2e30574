"""The exceptions of dsx. Each names the mistake, its place and what to do.

One ``DsxConfigError`` has all problems of a configuration that were found in one pass. Each is a ``Problem`` with the
path of the key, the value found, the expected value and what to do. The text never contains a rank, a host or a process
id, so all ranks print the same text and a launcher can show it once.

This module imports nothing heavy, so these exceptions can be caught before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx_core import CodedError, shorten

from ._version import __version__

__all__ = [
    "DsxConfigError",
    "DsxError",
    "LossScaleError",
    "PrecisionError",
    "Problem",
    "ScheduleError",
    "in_checkout",
]

_CODES = {
    "unknown-key": "DSX101",
    "type": "DSX102",
    "value": "DSX103",
    "conflict": "DSX104",
    "missing": "DSX106",
    "syntax": "DSX107",
    "duplicate-key": "DSX107",
    "source": "DSX107",
    "not-available": "DSX108",
}
"""The code of each kind of problem."""


def in_checkout(distribution: str) -> str:
    """The command that installs a package of ours that is missing or has another version. Package indexes hold none of
    ours: the name `dsx` there is a stranger's.
    """
    return f"in the checkout of dsx {__version__}: pip install --no-deps ./packages/{distribution}"


class DsxError(CodedError):
    """Base class of every exception that dsx itself raises. `code`: see `dsx_core.CodedError`."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration.

    Attributes:
        kind: ``unknown-key``, ``type``, ``value``, ``missing``, ``conflict``, ``duplicate-key``, ``syntax``, ``source``
            or ``not-available``.
        path: dotted path of the key, for example ``zero_optimization.stage``; empty for the document itself.
        message: what is wrong, in one sentence.
        got: the value found, as JSON text; empty if there is nothing to show.
        expected: the right value; empty if the message already says it.
        fix: what to do.
        where: place in the file, ``line 4, column 7``; empty for dictionaries.
        excerpt: lines of the file with a caret under the place; empty unless the text could not be read.
        code: under which docs/reference/errors.md explains it; the code of the kind unless another one is given.
    """

    kind: str
    path: str
    message: str
    got: str = ""
    expected: str = ""
    fix: str = ""
    where: str = ""
    excerpt: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", self.code or _CODES.get(self.kind, ""))  # the class is frozen

    def __str__(self) -> str:
        head = f"{shorten(self.path)}: {self.message}" if self.path else self.message
        if self.where:
            head += f" ({self.where})"
        if self.code:
            head += f" [{self.code}]"
        lines = [head]
        if self.excerpt:
            lines.append(self.excerpt)
        for label, text in (("got", self.got), ("expected", self.expected), ("fix", self.fix)):
            if text:
                lines.append(f"    {label + ':':<10}{text}")
        return "\n".join(lines)


class DsxConfigError(DsxError, ValueError):
    """A configuration that cannot be used; ``problems`` lists everything that is wrong with it.

    Args:
        problems: the problems, in the order of the document.
        source: the source of the configuration: a file name, ``dictionary`` or ``base64 text``.
    """

    def __init__(self, problems: Sequence[Problem], *, source: str = "dictionary") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        body = "\n".join("  " + str(problem).replace("\n", "\n  ") for problem in self.problems)
        codes = sorted({problem.code for problem in self.problems if problem.code})
        pages = f"\n  docs: dsx explain {' '.join(codes)}" if codes else ""
        return f"{title} in the configuration ({self.source})\n{body}{pages}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the finished text. Errors are pickled between processes.
        return (_rebuild_config_error, (self.problems, self.source))


def _rebuild_config_error(problems: tuple[Problem, ...], source: str) -> DsxConfigError:
    return DsxConfigError(problems, source=source)


class PrecisionError(DsxError, ValueError):
    """A combination of data types that cannot train."""


class LossScaleError(DsxError, RuntimeError):
    """The dynamic loss scale is at its minimum and the gradients still overflow."""

    code = "DSX401"


class ScheduleError(DsxError, ValueError):
    """A learning-rate schedule is unknown, or its arguments are not valid."""
