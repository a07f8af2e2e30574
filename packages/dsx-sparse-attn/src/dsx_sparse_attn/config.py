"""The `sparse_attention` section of a training configuration, and the sparsity config that it describes.

Only code that reads a configuration imports this module, because it needs pydantic. Keys and defaults are those of
DeepSpeed. Each mode reads its own keys. `unread` names keys that the mode does not read although they were set to
something else than their default, so that the code that applies a section can warn.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .errors import LayoutError
from .patterns import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = ["MODES", "SparseAttentionConfig"]


def _without_fraction(value: Any) -> Any:
    """Turn 1e2, as people write it in JSON, into 100; the strict check judges all other values."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Count = Annotated[int, BeforeValidator(_without_fraction), Field(ge=1)]
_Size = Annotated[int, BeforeValidator(_without_fraction), Field(ge=0)]

# mode -> (class, keys it reads in addition to block)
_WINDOWED = ("num_random_blocks", "local_window_blocks", "global_block_indices", "global_block_end_indices")
MODES: dict[str, tuple[type[SparsityConfig], tuple[str, ...]]] = {
    "dense": (DenseSparsityConfig, ("different_layout_per_head",)),
    "fixed": (
        FixedSparsityConfig,
        ("different_layout_per_head", "num_local_blocks", "num_global_blocks", "attention",
         "horizontal_global_attention", "num_different_global_patterns"),
    ),
    "variable": (
        VariableSparsityConfig,
        ("different_layout_per_head", *_WINDOWED, "attention", "horizontal_global_attention"),
    ),
    "bigbird": (
        BigBirdSparsityConfig,
        ("different_layout_per_head", "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks",
         "attention"),
    ),
    "bslongformer": (
        BSLongformerSparsityConfig,
        ("different_layout_per_head", "num_sliding_window_blocks", "global_block_indices", "global_block_end_indices",
         "attention"),
    ),
    "local": (LocalSlidingWindowSparsityConfig, ("num_sliding_window_blocks", "attention")),
}  # fmt: skip


class SparseAttentionConfig(BaseModel):
    """Layout of block-sparse attention."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = Field(
        "fixed", description="pattern of the blocks"
    )
    block: _Count = Field(16, description="rows and columns of a block, in tokens")
    different_layout_per_head: bool = Field(False, description="each head has its own layout")
    num_local_blocks: _Count = Field(4, description="blocks of a local window (fixed)")
    num_global_blocks: _Count = Field(1, description="global blocks of a window (fixed), or of the sequence (bigbird)")
    attention: Literal["bidirectional", "unidirectional"] = Field(
        "bidirectional", description="unidirectional: a token attends only to itself and to earlier tokens"
    )
    horizontal_global_attention: bool = Field(
        False, description="global blocks also attend to all blocks (fixed, variable)"
    )
    num_different_global_patterns: _Count = Field(
        1, description="number of different global patterns among the heads (fixed)"
    )
    num_random_blocks: _Size = Field(0, description="random blocks in each row of blocks (variable, bigbird)")
    local_window_blocks: list[int] = Field([4], description="number of blocks of each local window (variable)")
    global_block_indices: list[int] = Field(
        [0], description="indices of the global blocks, or where ranges of them begin (variable, bslongformer)"
    )
    global_block_end_indices: list[int] | None = Field(
        None, description="exclusive ends of the ranges of global blocks (variable, bslongformer); null: single blocks"
    )
    num_sliding_window_blocks: _Count = Field(
        3, description="blocks of the sliding window (bigbird, bslongformer, local)"
    )

    def unread(self) -> list[str]:
        """Keys that were set although this mode does not read them. Published configurations often have such keys."""
        read = {"mode", "block", *MODES[self.mode][1]}
        fields = type(self).model_fields
        return sorted(k for k in self.model_fields_set - read if getattr(self, k) != fields[k].default)

    def notice(self) -> str:
        """The text of a warning about `unread` keys, with its code; "" if there are none."""
        unread = self.unread()
        if not unread:
            return ""
        return f"sparse_attention: mode {self.mode} does not read {', '.join(unread)} [DSX157] docs: dsx explain DSX157"

    def sparsity_config(self, num_heads: int, *, defaults: Literal["section", "class"] = "section") -> SparsityConfig:
        """The sparsity config of this mode for `num_heads` heads.

        Args:
            num_heads: heads of the attention.
            defaults: the defaults for keys that were not set: those of the section or of the class. They differ in one
                key: `num_random_blocks` is 0 in a section and 1 in `BigBirdSparsityConfig`, as in DeepSpeed.

        Raises:
            LayoutError: a combination of keys has no meaning; the text names the section.
        """
        kind, keys = MODES[self.mode]
        if defaults == "class":
            keys = tuple(key for key in keys if key in self.model_fields_set)
        try:
            given = {k: getattr(self, k) for k in keys}
            return kind(num_heads, block=self.block, **given)  # pyright: ignore[reportCallIssue]
        except LayoutError as error:
            raise LayoutError(f"sparse_attention (mode {self.mode!r}): {error}") from error
