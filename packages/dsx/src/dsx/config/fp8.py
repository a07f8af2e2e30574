"""The section `fp8`: linear layers that multiply in 8-bit floating point."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section

__all__ = ["FP8"]


class FP8(Section):
    """Linear layers that multiply in 8-bit floating point, by torchao; masters and states keep their dtypes."""

    enabled: bool = Field(True, description="switches the section on")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        "tensorwise",
        description="a scale for each tensor, for each row, or for each row with gradients of weights in 16 bits",
    )
    exclude: list[str] = Field(
        ["lm_head"], description="parts of module names (between dots) whose linear layers stay as they are"
    )
    gather: bool = Field(True, description="at stage 3 weights with one scale each are gathered in 8 bits")
    emulate: bool | Literal["auto"] = Field(
        "auto", description="compute with numbers rounded to 8 bits, for devices without such units; auto: on the CPU"
    )
