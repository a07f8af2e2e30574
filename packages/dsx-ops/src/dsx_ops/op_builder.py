"""The operators by the builder names scripts know: `CPUAdamBuilder().load()`, `.is_compatible()` (F88).

Nothing is built here: native code is compiled when the package is installed, and without it the PyTorch reference serves. So every builder
loads, and `is_compatible` says whether it runs in compiled code. What `load` returns is a namespace with the functions and classes of this package
(under the names that scripts call where these are known: `swizzle_quant`, `quantized_reduction`), not a C++ module with raw handles.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

from .status import native_status


class OpBuilder:
    """One group of operators. `members`: name in the namespace -> `module:attribute` below `dsx_ops`."""

    NAME = ""
    members: dict[str, str] = {}

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """The group's functions and classes. `verbose` is accepted; there is nothing to report, since nothing is built."""
        found = {}
        for name, place in self.members.items():
            module, attribute = place.split(":")
            found[name] = getattr(importlib.import_module(f"dsx_ops.{module}"), attribute)
        return SimpleNamespace(**found)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the group runs in compiled code here; `why_not` says why it does not."""
        return bool(native_status()["native"])

    def why_not(self) -> str:
        """Why there is no compiled code; "" when there is."""
        return str(native_status()["reason"])

    def absolute_name(self) -> str:
        """Where the group lives."""
        return f"dsx_ops.{self.NAME}"


_TRANSFORMER = {
    "TransformerLayer": "transformer.layer:TransformerLayer",
    "TransformerConfig": "transformer.config:TransformerConfig",
}
_GROUPS: dict[str, dict[str, str]] = {
    "CPUAdam": {"CPUAdam": "optim.adam:CPUAdam", "Adam8bit": "optim.adam:Adam8bit"},
    "CPUAdagrad": {"CPUAdagrad": "optim.simple:CPUAdagrad"},
    "CPULion": {"CPULion": "optim.simple:CPULion"},
    "FusedAdam": {"FusedAdam": "optim.adam:FusedAdam"},
    "FusedLamb": {"FusedLamb": "optim.lamb:FusedLamb"},
    "FusedLion": {"FusedLion": "optim.simple:FusedLion"},
    "Quantizer": {
        "ds_quantizer": "codes.quantize:ds_quantizer",
        "quantize": "codes.quantize:quantize",
        "dequantize": "codes.quantize:dequantize",
        "swizzle_quant": "codes.exchange:swizzle_quantize",
        "quantized_reduction": "codes.exchange:reduce_quantize",
        "LocoQuantizer": "codes.exchange:LocoQuantizer",
    },
    "FPQuantizer": {
        "quantize": "codes.quantize:quantize_fp8",
        "dequantize": "codes.quantize:dequantize_fp8",
    },
    "RandomLTD": {
        name: f"tokens:{name}"
        for name in ("token_sort_", "token_gather", "token_scatter_", "mask_gather_bert", "mask_gather_gpt")
    },
    "Transformer": _TRANSFORMER,
    "StochasticTransformer": _TRANSFORMER,
    "Utils": {name: f"flat:{name}" for name in ("flatten", "unflatten", "cast_to_byte_tensor")},
}


def _builder(name: str) -> type[OpBuilder]:
    return type(f"{name}Builder", (OpBuilder,), {"NAME": name, "members": _GROUPS[name], "__doc__": f"{name}."})


CPUAdamBuilder = _builder("CPUAdam")
CPUAdagradBuilder = _builder("CPUAdagrad")
CPULionBuilder = _builder("CPULion")
FusedAdamBuilder = _builder("FusedAdam")
FusedLambBuilder = _builder("FusedLamb")
FusedLionBuilder = _builder("FusedLion")
QuantizerBuilder = _builder("Quantizer")
FPQuantizerBuilder = _builder("FPQuantizer")
RandomLTDBuilder = _builder("RandomLTD")
TransformerBuilder = _builder("Transformer")
StochasticTransformerBuilder = _builder("StochasticTransformer")
UtilsBuilder = _builder("Utils")

ALL_OPS: dict[str, type[OpBuilder]] = {
    builder.NAME: builder
    for builder in (
        *(CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder, FusedAdamBuilder, FusedLambBuilder, FusedLionBuilder),
        *(QuantizerBuilder, FPQuantizerBuilder, RandomLTDBuilder, UtilsBuilder),
        *(TransformerBuilder, StochasticTransformerBuilder),
    )
}
