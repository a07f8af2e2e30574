"""Masks secrets in what a run records about itself: its configuration and its command.

Reports and checkpoints are sent to colleagues; a key of a service must not be in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MASK", "command_without_secrets", "without_secrets"]

MASK = "***"

_WORDS = frozenset(("password", "passwd", "passphrase", "secret", "secrets", "token", "credential", "credentials"))
_KEYS = ("api_key", "apikey", "access_key", "secret_key", "private_key", "auth_key")
_OF_TEXT = frozenset(("pad", "eos", "bos", "unk", "mask", "cls", "sep", "image", "special", "start", "end"))
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a key or option of this name holds a secret: `api_key`, `hf_token`, `--password`; not `max_tokens` or
    `pad_token`.
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [word for word in re.split(r"[^a-z0-9]+", snake) if word]
    if words[-1:] == ["token"] and words[-2:-1] and words[-2] in _OF_TEXT:
        return False
    return bool(words) and (words[-1] in _WORDS or "_".join(words).endswith(_KEYS))


def without_secrets(value: Any) -> Any:
    """A copy of nested mappings and sequences in which the values of secret keys, and logins in addresses, are `MASK`.

    Values that are not set (None or "") stay as they are.
    """
    if isinstance(value, Mapping):
        return {key: _masked(item) if is_secret(str(key)) else without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return _IN_URL.sub(MASK, value) if isinstance(value, str) else value


def _masked(value: Any) -> Any:
    return value if value is None or value == "" else MASK


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """The words of a command, with the values of secret options masked: of `--api_key X`, `--api-key=X` and
    `comet.api_key=X`.
    """
    masked: list[str] = []
    follows = False
    for word in command:
        name, equals, value = word.partition("=")
        if follows and not word.startswith("-"):
            masked.append(MASK)
        elif equals and is_secret(name):
            masked.append(f"{name}={_masked(value)}")
        else:
            masked.append(without_secrets(word))
        follows = word.startswith("-") and not equals and is_secret(word)
    return masked
