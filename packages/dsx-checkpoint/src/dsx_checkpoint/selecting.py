"""Loading a part of a checkpoint, or one whose names or number of rows differ from the model's.

    Selection(only=(r"lora_",))                            # only adapters; everything else does not change
    Selection(key_mapping={r"^model\\.": "backbone."})      # names in the checkpoint -> names in the model
    Selection(padded_vocabulary=(r"embed_tokens", r"lm_head"))  # rows that the checkpoint does not have are zeros

Patterns are regular expressions that may match anywhere in a name (`re.search`, `re.sub`). This module needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import CheckpointArgumentError, CheckpointError, shown

__all__ = ["Selection"]


@dataclass(frozen=True)
class Selection:
    """The tensors of a checkpoint that are wanted, and their names.

    Attributes:
        only: patterns of names in the model; nothing else is loaded, or missed. None: everything.
        key_mapping: pattern -> replacement, applied one after the other to each name in the checkpoint; the result is
            the name in the model.
        padded_vocabulary: patterns of tensors in the model that may have more or fewer rows (first dimension) than in
            the checkpoint. Rows that the checkpoint does not have become zeros, in the optimizer states too; rows that
            the model does not have are left out.
        weights: False: parameters and masters stay as they are, and buffers too; optimizer states are loaded where they
            fit.
    """

    only: Sequence[str] | None = None
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    padded_vocabulary: Sequence[str] = ()
    weights: bool = True

    def __post_init__(self) -> None:
        for argument, patterns in (
            ("only", self.only or ()),
            ("key_mapping", tuple(self.key_mapping)),
            ("padded_vocabulary", self.padded_vocabulary),
        ):
            if isinstance(patterns, str):
                raise CheckpointArgumentError(
                    f"{argument}: got the text {shown(patterns)}, expected a list of patterns"
                )
            for pattern in patterns:
                compiled(argument, pattern)

    def wants(self, name: str) -> bool:
        """Whether a tensor of the model is to be loaded."""
        return self.weights and self.selects(name)

    def selects(self, name: str) -> bool:
        """Whether `only` leaves a tensor of the model in."""
        return self.only is None or any(re.search(pattern, name) for pattern in self.only)

    def may_pad(self, name: str) -> bool:
        """Whether the number of rows of a tensor of the model may differ."""
        return any(re.search(pattern, name) for pattern in self.padded_vocabulary)

    def renamed(self, stored: Iterable[str]) -> dict[str, str]:
        """Name in the model -> name in the checkpoint, for the names that `key_mapping` changes.

        Raises:
            CheckpointError: two names in the checkpoint become one.
        """
        found: dict[str, str] = {}
        if not self.key_mapping:
            return found
        names = list(stored)
        taken: dict[str, str] = {}
        for name in names:
            new = name
            for pattern, replacement in self.key_mapping.items():
                new = re.sub(pattern, replacement, new)
            if taken.setdefault(new, name) != name:
                raise CheckpointError(
                    f"key_mapping: {shown(taken[new])} and {shown(name)} of the checkpoint both become {shown(new)}"
                )
            if new != name:
                found[new] = name
        return found


def compiled(argument: str, pattern: object) -> re.Pattern[str]:
    """The regular expression of an argument.

    Raises:
        CheckpointArgumentError: it is none.
    """
    if not isinstance(pattern, str):
        raise CheckpointArgumentError(f"{argument}: got {shown(pattern)}, expected regular expressions as text")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointArgumentError(f"{argument}: {shown(pattern)} is no regular expression: {error}") from error
