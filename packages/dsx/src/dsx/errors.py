"""The exceptions of dsx: every mistake of a user has a name, a place and a way out.

A configuration is judged as a whole: all problems found in one pass are carried by one ``DsxConfigError``, each as a
``Problem`` with the path of the key, what was found there, what would be right and what to do. The text never contains
a rank, a host or a process id, so all ranks print the same words and a launcher can show them once.

This module imports nothing: it is safe to catch these exceptions before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DsxConfigError", "DsxError", "LossScaleError", "PrecisionError", "Problem", "ScheduleError", "shorten"]


class DsxError(Exception):
    """Base of every exception raised by dsx itself."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        kind: ``unknown-key``, ``type``, ``value``, ``missing``, ``conflict``, ``duplicate-key``, ``syntax``, ``source``
            or ``not-available``.
        path: dotted path of the key, for example ``zero_optimization.stage``; empty for the document itself.
        message: what is wrong, in one sentence.
        got: what was found, as JSON text; empty when there is nothing to show.
        expected: what would be right; empty when the message already says it.
        fix: what to do.
        where: place in the file, ``line 4, column 7``; empty for dictionaries.
        excerpt: lines of the file with a caret under the place; empty unless the text could not be read.
    """

    kind: str
    path: str
    message: str
    got: str = ""
    expected: str = ""
    fix: str = ""
    where: str = ""
    excerpt: str = ""

    def __str__(self) -> str:
        head = f"{shorten(self.path)}: {self.message}" if self.path else self.message
        if self.where:
            head += f" ({self.where})"
        lines = [head]
        if self.excerpt:
            lines.append(self.excerpt)
        for label, text in (("got", self.got), ("expected", self.expected), ("fix", self.fix)):
            if text:
                lines.append(f"    {label + ':':<10}{text}")
        return "\n".join(lines)


def shorten(text: str, width: int = 120) -> str:
    """Return `text`, or its beginning and its length where it is longer than `width`: a message is to be read."""
    return text if len(text) <= width else f"{text[: width - 20]}... ({len(text)} characters)"


class DsxConfigError(DsxError, ValueError):
    """A configuration that cannot be used; ``problems`` lists everything that is wrong with it.

    Args:
        problems: what was found, in the order of the document.
        source: what the configuration came from: a file name, ``dictionary`` or ``base64 text``.
    """

    def __init__(self, problems: Sequence[Problem], *, source: str = "dictionary") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        body = "\n".join("  " + str(problem).replace("\n", "\n  ") for problem in self.problems)
        return f"{title} in the configuration ({self.source})\n{body}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the finished text; errors travel between processes.
        return (_rebuild_config_error, (self.problems, self.source))


def _rebuild_config_error(problems: tuple[Problem, ...], source: str) -> DsxConfigError:
    return DsxConfigError(problems, source=source)


class PrecisionError(DsxError, ValueError):
    """A combination of data types that cannot train."""


class LossScaleError(DsxError, RuntimeError):
    """The dynamic loss scale is at its minimum and the gradients still overflow."""


class ScheduleError(DsxError, ValueError):
    """A learning-rate schedule with arguments that make no sense, or an unknown one."""
