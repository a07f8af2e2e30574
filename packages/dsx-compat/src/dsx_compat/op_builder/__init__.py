"""The operators by the builder names scripts know: `CPUAdamBuilder().load()`, `.is_compatible()`.

Nothing is built here: native code is compiled when the package is installed, and without it the PyTorch reference
serves. So every builder of an operator that dsx has loads, and `is_compatible` says whether it runs in compiled code.
`load` returns a namespace with the functions and classes of dsx_ops, and with the functions that scripts call on such a
handle (`quantizer`, `adam`). `AsyncIOBuilder` and `GDSBuilder` are those of dsx_nvme. Builders of what is not part of
dsx, or has no builder there, exist too: their `load` raises and names the way.

`COMPATIBLE_OPS` (`deepspeed.ops.__compatible_ops__`) says which groups run in compiled code here, by `NAME`.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

from dsx_nvme import AsyncIOBuilder, GDSBuilder
from dsx_ops.errors import OpsError
from dsx_ops.status import native_status

from .adam import CPUAdamHandle


class OpBuilder:
    """One group of operators. `members`: name in the namespace -> `module:attribute`."""

    NAME = ""
    members: dict[str, str] = {}

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """The group's functions and classes. `verbose` is accepted; there is nothing to report, since nothing is
        built.
        """
        found = {}
        for name, place in self.members.items():
            module, attribute = place.split(":")
            found[name] = getattr(importlib.import_module(module), attribute)
        return SimpleNamespace(**found)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the group runs in compiled code here; `why_not` says why it does not."""
        return bool(native_status()["native"])

    def why_not(self) -> str:
        """The reason why there is no compiled code; "" when there is some."""
        return str(native_status()["reason"])

    def absolute_name(self) -> str:
        """The name of the module of the group."""
        return f"dsx_ops.{self.NAME}"


class CPUAdamOpBuilder(OpBuilder):
    """CPU Adam, and its raw functions: `create_adam`, `adam_update`, `adam_rollback`, `destroy_adam`."""

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """The classes, and the functions of a fresh handle."""
        found, handle = super().load(verbose), CPUAdamHandle()
        for name in ("create_adam", "destroy_adam", "adam_update", "adam_rollback"):
            setattr(found, name, getattr(handle, name))
        return found


class ElsewhereBuilder(OpBuilder):
    """A group that has no builder in dsx; `way` says where it is or what serves instead."""

    way = ""

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """Raises `OpsError`."""
        raise OpsError(f"{type(self).__name__}: {self.why_not()}")

    def is_compatible(self, verbose: bool = False) -> bool:
        """False."""
        return False

    def why_not(self) -> str:
        """The way to what the builder stands for."""
        return f"not in dsx; {self.way}"


_QUANTIZER_FUNCTIONS = (
    *("quantize", "dequantize", "dequantize_fp32", "swizzle_quant", "quantized_reduction"),
    *("loco_swizzle_quant", "loco_quantized_reduction", "QuantizationType", "Symmetric", "Asymmetric"),
    *("ds_quantize_fp32", "ds_quantize_fp16", "ds_sr_quantize_fp32", "ds_sr_quantize_fp16"),
    *("ds_quantize_asym_fp32", "ds_quantize_asym_fp16", "ds_sr_quantize_asym_fp32", "ds_sr_quantize_asym_fp16"),
    *("dequantize_int4_to_half_experimental", "dequantize_int8_to_half_experimental"),
)
_TRANSFORMER = {
    "TransformerLayer": "dsx_ops.transformer.layer:TransformerLayer",
    "TransformerConfig": "dsx_ops.transformer.config:TransformerConfig",
}
_GROUPS: dict[str, dict[str, str]] = {
    "CPUAdam": {"CPUAdam": "dsx_ops.optim.adam:CPUAdam", "Adam8bit": "dsx_ops.optim.coded:Adam8bit"},
    "CPUAdagrad": {"CPUAdagrad": "dsx_ops.optim.simple:CPUAdagrad"},
    "CPULion": {"CPULion": "dsx_ops.optim.simple:CPULion"},
    "FusedAdam": {"FusedAdam": "dsx_ops.optim.adam:FusedAdam"},
    "FusedLamb": {"FusedLamb": "dsx_ops.optim.lamb:FusedLamb"},
    "FusedLion": {"FusedLion": "dsx_ops.optim.simple:FusedLion"},
    "Quantizer": {
        "ds_quantizer": "dsx_ops.codes.quantize:ds_quantizer",
        "LocoQuantizer": "dsx_ops.codes.exchange:LocoQuantizer",
        **{name: f"dsx_compat.op_builder.quantizer:{name}" for name in _QUANTIZER_FUNCTIONS},
    },
    "FPQuantizer": {
        "quantize": "dsx_ops.codes.quantize:quantize_fp8",
        "dequantize": "dsx_ops.codes.quantize:dequantize_fp8",
    },
    "RandomLTD": {
        name: f"dsx_ops.tokens:{name}"
        for name in ("token_sort_", "token_gather", "token_scatter_", "mask_gather_bert", "mask_gather_gpt")
    },
    "Transformer": _TRANSFORMER,
    "StochasticTransformer": _TRANSFORMER,
    "Utils": {name: f"dsx_ops.flat:{name}" for name in ("flatten", "unflatten", "cast_to_byte_tensor")},
}


_INFERENCE = "inference kernels are not part of dsx; use torch.compile, or an inference engine such as vLLM"
_ELSEWHERE = {
    "SparseAttn": "sparse attention is dsx_sparse_attn (package dsx-sparse-attn)",
    "ShareMemComm": "collectives over shared memory are dsx_comm's process group (package dsx-comm)",
    "CCLComm": "oneCCL is not used; dsx_comm's process groups serve CPU ranks (package dsx-comm)",
    "PinMemory": "pin with torch's Tensor.pin_memory(), or allocate with dsx_nvme.empty(..., pin=True)",
    "DeepCompile": "there are no compiler passes of our own; use torch.compile on the modules of the model",
    "EvoformerAttn": (
        "torch.nn.functional.scaled_dot_product_attention takes the pair bias as attn_mask, with gradients"
    ),
    "Inference": _INFERENCE,
    "InferenceCore": _INFERENCE,
    "InferenceCutlass": _INFERENCE,
    "RaggedOps": _INFERENCE,
    "RaggedUtils": _INFERENCE,
    "SpatialInference": _INFERENCE,
}


_NAMES = {
    "CPUAdam": "cpu_adam", "CPUAdagrad": "cpu_adagrad", "CPULion": "cpu_lion", "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb", "FusedLion": "fused_lion", "Quantizer": "quantizer", "FPQuantizer": "fp_quantizer",
    "RandomLTD": "random_ltd", "Transformer": "transformer", "StochasticTransformer": "stochastic_transformer",
    "Utils": "utils", "SparseAttn": "sparse_attn",
    "ShareMemComm": "deepspeed_shm_comm", "CCLComm": "deepspeed_ccl_comm", "PinMemory": "pin_memory",
    "DeepCompile": "dc", "EvoformerAttn": "evoformer_attn", "Inference": "transformer_inference",
    "InferenceCore": "inference_core_ops", "InferenceCutlass": "cutlass_ops", "RaggedOps": "ragged_device_ops",
    "RaggedUtils": "ragged_ops", "SpatialInference": "spatial_inference",
}  # fmt: skip
"""Prefix of the class -> `NAME`, by which DeepSpeed's scripts look operators up."""


def _builder(name: str, base: type[OpBuilder] = OpBuilder) -> type[OpBuilder]:
    return type(f"{name}Builder", (base,), {"NAME": _NAMES[name], "members": _GROUPS[name], "__doc__": f"{name}."})


def _elsewhere(name: str) -> type[OpBuilder]:
    return type(
        f"{name}Builder",
        (ElsewhereBuilder,),
        {"NAME": _NAMES[name], "way": _ELSEWHERE[name], "__doc__": f"{name}: elsewhere."},
    )


CPUAdamBuilder = _builder("CPUAdam", CPUAdamOpBuilder)
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

CCLCommBuilder = _elsewhere("CCLComm")
DeepCompileBuilder = _elsewhere("DeepCompile")
EvoformerAttnBuilder = _elsewhere("EvoformerAttn")
InferenceBuilder = _elsewhere("Inference")
InferenceCoreBuilder = _elsewhere("InferenceCore")
InferenceCutlassBuilder = _elsewhere("InferenceCutlass")
PinMemoryBuilder = _elsewhere("PinMemory")
RaggedOpsBuilder = _elsewhere("RaggedOps")
RaggedUtilsBuilder = _elsewhere("RaggedUtils")
ShareMemCommBuilder = _elsewhere("ShareMemComm")
SparseAttnBuilder = _elsewhere("SparseAttn")
SpatialInferenceBuilder = _elsewhere("SpatialInference")

ALL_OPS: dict[str, type[OpBuilder | AsyncIOBuilder]] = {
    builder.NAME: builder
    for builder in (
        *(CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder, FusedAdamBuilder, FusedLambBuilder, FusedLionBuilder),
        *(QuantizerBuilder, FPQuantizerBuilder, RandomLTDBuilder, UtilsBuilder),
        *(TransformerBuilder, StochasticTransformerBuilder),
        *(AsyncIOBuilder, GDSBuilder, SparseAttnBuilder, ShareMemCommBuilder, CCLCommBuilder, PinMemoryBuilder),
        *(DeepCompileBuilder, EvoformerAttnBuilder, InferenceBuilder, InferenceCoreBuilder, InferenceCutlassBuilder),
        *(RaggedOpsBuilder, RaggedUtilsBuilder, SpatialInferenceBuilder),
    )
}


def __getattr__(name: str) -> dict[str, bool]:
    """`COMPATIBLE_OPS` is found out when it is asked for: that loads native code, which an import must not."""
    if name != "COMPATIBLE_OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {"deepspeed_not_implemented": False, **{key: kind().is_compatible() for key, kind in ALL_OPS.items()}}
