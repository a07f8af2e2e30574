"""Classes that answer for members of DeepSpeed's that dsx does not have: the error says what to use instead.

To read such a member raises, on the class as on an object. To assign or override it is refused too, because nothing of
dsx would call it: the program would run with what it wanted to replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import MemberNotSupportedError

__all__ = ["RefusingClass", "refuse"]


def refuse(shown: str, name: str, advice: str) -> NoReturn:
    """Raise the error of a member.

    Raises:
        MemberNotSupportedError: always.
    """
    raise MemberNotSupportedError(f"{shown}.{name}: dsx does not have it; {advice}")


class RefusingClass(type):
    """The metaclass. A class has the table `_refused`, member -> advice, and `_shown`, its name in errors."""

    _refused: Mapping[str, str]
    _shown: str

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> None:
        super().__init__(name, bases, namespace, **options)
        for member in cls._refused.keys() & namespace.keys():
            refuse(cls._shown, member, cls._refused[member])

    if not TYPE_CHECKING:  # with it every misspelt name would pass a checker

        def __getattr__(cls, name: str) -> NoReturn:  # only for names that the class does not have
            if name in cls._refused:
                refuse(cls._shown, name, cls._refused[name])
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in cls._refused:
            refuse(cls._shown, name, cls._refused[name])
        super().__setattr__(name, value)
