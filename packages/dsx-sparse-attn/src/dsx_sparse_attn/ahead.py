"""Compiles the Triton kernels ahead of time, for a GPU that this machine need not have, and reports their resources.

Triton's compiler runs without a GPU. It compiles the launches of a call (`triton_gpu.launches`), with the types and
divisibilities that Triton would find in its arguments. The assembler's report gives registers and spilled bytes.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import Options, checked
from .backends.triton_gpu import Launch, launches
from .backends.triton_table import ARCHITECTURES, MOST_SPILLED, Row
from .call import AttentionCall
from .errors import SparseAttentionError

__all__ = ["LONGEST", "OPTIONS", "Compiled", "broken_promises", "compile_launch", "compile_row"]

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
_ALIGNED = 16

LONGEST = 60.0  # CPU seconds that compiling a row may take
# A row must work for calls with these options: (causal, mask of the keys and dropout, head dimension below the row's).
# Whether a bias is added is part of the row.
OPTIONS: dict[str, tuple[bool, bool, bool]] = {
    "plain": (False, False, False),
    "causal": (True, False, False),
    "all": (True, True, False),
    "smaller dimension": (True, True, True),
}


class Compiled(NamedTuple):
    """The resources of a compiled kernel: bytes of shared memory, registers and spilled bytes per thread; and the CPU
    seconds that compiling took.
    """

    shared: int
    registers: int
    spilled: int
    seconds: float


def compile_row(row: Row, arch: int, option: str = "all") -> Compiled:
    """Compile the kernel of a table's row for sm_`arch` with one of `OPTIONS`.

    Raises:
        SparseAttentionError: Triton cannot compile it.
    """
    call = _call(row, *OPTIONS[option])
    for described in launches(call):
        if described.need is not None and described.need.kernel == row.kernel:
            return compile_launch(described.make(row.tiles), arch)
    raise SparseAttentionError(f"there is no kernel {row.kernel!r}")


def broken_promises(row: Row, arch: int, found: Compiled) -> list[str]:
    """The points in which a compiled kernel needs more than its row says; empty if there are none."""
    promised = row.shared[ARCHITECTURES.index(arch)]
    wrong = []
    if promised is None or found.shared > promised:
        wrong.append(f"needs {found.shared} bytes of shared memory, the table says {promised}")
    if found.spilled > MOST_SPILLED:
        wrong.append(f"spills {found.spilled} bytes per thread, at most {MOST_SPILLED} are allowed")
    if found.seconds > LONGEST:
        wrong.append(f"took {found.seconds:.0f} s to compile, at most {LONGEST:.0f} are allowed")
    return wrong


def _call(row: Row, causal: bool, masked: bool, smaller: bool) -> AttentionCall:
    seq, heads, block = 1024, 4, max(16, row.least_block)
    dim = row.dim * 3 // 4 if smaller else row.dim
    q, k, v = (torch.empty(2, heads, seq, dim, dtype=torch.float32 if row.wide else torch.bfloat16) for _ in range(3))
    options = Options(
        rpe=torch.zeros(heads, seq, seq, requires_grad=True) if row.biased else None,
        key_padding_mask=torch.zeros(2, seq) if masked else None,
        causal=causal, dropout_p=0.1 if masked else 0.0, block=block,
    )  # fmt: skip
    return checked(q, k, v, torch.ones(heads, seq // block, seq // block, dtype=torch.int64), options)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile a launch for sm_`arch`. Raises `SparseAttentionError` when Triton cannot."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    if not hasattr(launch.kernel, "params"):
        raise SparseAttentionError("TRITON_INTERPRET=1 is set, so the kernels are interpreted and cannot be compiled")
    begun, report = _cpu_seconds(), io.StringIO()
    with _reporting(knobs), contextlib.redirect_stdout(report):
        try:
            made = triton.compile(_source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
        except Exception as error:
            raise SparseAttentionError(
                f"Triton {triton.__version__} does not compile it for sm_{arch}: {error}"
            ) from error
    text = report.getvalue()
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    if not registers:
        raise SparseAttentionError(f"the assembler's report has no registers in it: {text[:200]!r}")
    return Compiled(made.metadata.shared, max(registers), max(spilled, default=0), _cpu_seconds() - begun)


@contextlib.contextmanager
def _reporting(knobs: Any) -> Iterator[None]:
    """Inside the context the assembler's report goes to stdout. Triton's cache is not used, because it has no
    report.
    """
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the assemblers that it waited for."""
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _source(launch: Launch) -> Any:
    """A launch's arguments with the types that Triton gives them: 1 and None are constants, and multiples of 16 are
    marked.
    """
    from triton.compiler import ASTSource

    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        known = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (known and type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if isinstance(value, Tensor) or (known and type(value) is int and value % _ALIGNED == 0):
            attributes[(at,)] = [["tt.divisibility", _ALIGNED]]
    return ASTSource(kernel, signature, constants, attributes)


def _type_of(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
