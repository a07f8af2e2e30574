"""What the kernels move, counted by the emulator: bytes per element, and how well the lanes of a warp share accesses.

The idea: a job is one call of a kernel on host tensors. The emulator notes every access to memory, and counts
- the distinct pieces of 32 bytes (sectors) that were read or written: what crosses the memory bus at least,
- the bytes that all threads asked for, and
- the sectors that the warps asked for, one access of all lanes at a time.
Beside them stands what the job must move: the bytes of its inputs and outputs. So a second pass over memory, a byte per
load, or lanes that are apart each show in a number. What it leaves out: caches and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import dsx_ops
import torch
from dsx_ops import update
from dsx_ops.cuda import flat
from dsx_ops.cuda import optimizers as cuda_optimizers
from dsx_ops.cuda.operators import KERNELS
from dsx_ops.spec import Batch
from torch import Tensor

SECTOR = 32
ROWS, COLS = 512, 1024


@dataclass(frozen=True)
class Job:
    """One call. `needed`: the bytes it must read and write; `elements`: what the figures are divided by."""

    name: str
    elements: int
    needed: int
    run: Callable[[], object]


@dataclass(frozen=True)
class Traffic:
    """Per element: `needed` bytes, `moved` bytes (distinct sectors), `asked` bytes (by all threads).

    `shared`: bytes asked for per byte of the sectors that the warps asked for; 1 when lanes are side by side.
    `width`: bytes per access.
    """

    name: str
    needed: float
    moved: float
    asked: float
    shared: float
    width: float


def bytes_of(*tensors: Tensor) -> int:
    """What the tensors occupy."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _kernel(module: Any, name: str, *arguments: Any, also: int = 0) -> Job:
    """A call of an operator's kernel; its first argument gives the elements."""
    kernel = KERNELS[name].run
    found = kernel(module, *arguments)
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, Tensor)]
    inputs = [t for t in arguments if isinstance(t, Tensor)]
    needed = bytes_of(*inputs, *outputs) + also
    return Job(name, inputs[0].numel(), needed, lambda: kernel(module, *arguments))


def _rows(module: Any, dtype: torch.dtype) -> Iterator[Job]:
    x, grad, weight = torch.randn(ROWS, COLS).to(dtype), torch.randn(ROWS, COLS).to(dtype), torch.randn(COLS).to(dtype)
    yield _kernel(module, "layer_norm", x, weight, weight, 1e-5, False)
    yield _kernel(module, "add_layer_norm", x, grad, weight, weight, 1e-5)
    # The column sums' share falls with the number of rows; 4096 short ones stand for the 16384 of 1024 of practice.
    tall, narrow = torch.randn(4096, 256).to(dtype), torch.randn(256).to(dtype)
    mean, rstd = torch.zeros(4096), torch.ones(4096)
    yield _kernel(module, "layer_norm_backward", tall, tall.clone(), mean, rstd, narrow, narrow, None, False)
    yield _kernel(module, "bias_gelu", x, weight, True)
    yield _kernel(module, "bias_gelu_backward", grad, x, weight, True)
    yield _kernel(module, "bias_dropout_residual", x, weight, grad, 0.1, 5, 0)
    yield _kernel(module, "bias_grad", grad, dtype, 0.1, 5, 0)
    yield _kernel(module, "masked_softmax", x, torch.rand(1, COLS) > 0.5, 1.0)
    yield _kernel(module, "softmax_backward", grad, x, 1.0)
    indices = torch.stack([torch.randperm(128)[:64] for _ in range(2)])
    part = torch.randn(2, 64, COLS).to(dtype)
    kernel = KERNELS["token_gather"].run
    sequence = torch.randn(2, 128, COLS).to(dtype)
    needed = 2 * bytes_of(part) + bytes_of(indices)
    yield Job("token_gather", part.numel(), needed, lambda: kernel(module, sequence, indices, True))


def _codes(module: Any, dtype: torch.dtype) -> Iterator[Job]:
    x = torch.randn(ROWS * COLS).to(dtype)
    for format, group in (("int8", 256), ("int4_asym", 256), ("e4m3", 2048), ("int8", 16384)):
        job = _kernel(module, "quantize", x, format, group, False, 0, 0, [1, 1, 1])
        yield Job(f"quantize {format}, groups of {group}", job.elements, job.needed, job.run)
    for format in ("int8", "int4_asym"):
        q = KERNELS["quantize"].run(module, x, format, 256, False, 0, 0, [1, 1, 1])
        job = _kernel(module, "dequantize", *q, [x.numel()], format, 256, [1, 1, 1], dtype)
        yield Job(f"dequantize {format}", x.numel(), job.needed, job.run)
    if dtype is not torch.float32:
        return
    q = KERNELS["quantize"].run(module, x, "int8", 256, False, 0, 0, [1, 1, 1])
    n = x.numel() // 4
    out = torch.empty(n)
    reduced = _kernel(module, "reduce_codes", *q, 4, "int8", 256, 0.25, out)
    yield Job("reduce_codes, 4 ranks", n, reduced.needed, reduced.run)
    again = _kernel(module, "requantize", *q, 4, n, "int8", 256, 0.25, "int8", 256, False, 0, 0)
    yield Job("requantize, 4 ranks", n, again.needed, again.run)


def _signs(module: Any, dtype: torch.dtype) -> Iterator[Job]:
    n = ROWS * COLS
    x, error = torch.randn(n).to(dtype), torch.randn(n)
    yield _kernel(module, "pack_signs", x)
    packed, scale = KERNELS["compress_signs"].run(module, x, error)
    yield Job(
        "compress_signs", n, bytes_of(x, error, error, packed), lambda: KERNELS["compress_signs"].run(module, x, error)
    )
    job = _kernel(module, "unpack_signs", packed, scale, n, dtype)
    yield Job("unpack_signs", n, job.needed, job.run)
    if dtype is torch.float32:
        rows, out = packed.view(1, -1).expand(4, -1).contiguous(), torch.empty(n)
        job = _kernel(module, "mean_of_signs", rows, scale.expand(4).contiguous(), n, out)
        yield Job("mean_of_signs, 4 ranks", n, job.needed, job.run)


def _optimizers(module: Any, dtype: torch.dtype) -> Iterator[Job]:
    n = ROWS * COLS
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "AdamW": dsx_ops.FusedAdam,
        "Lion": dsx_ops.FusedLion,
        "Adam8bit": dsx_ops.Adam8bit,
    }
    for name, make in makers.items():
        param = torch.randn(n).to(dtype)
        param.grad = torch.randn(n).to(dtype)
        optimizer = make([param])
        batches: list[Batch] = []
        before = update.apply
        update.apply = batches.append  # the first step makes the states and says what is to be done
        try:
            optimizer.step()
        finally:
            update.apply = before
        (batch,) = batches
        slot = batch.slots[0]
        needed = 2 * bytes_of(param, *slot.states, *slot.scales) + bytes_of(param.grad)
        yield Job(name, n, needed, partial(cuda_optimizers.run, module, batch))
    x = torch.randn(n).to(dtype)
    yield Job("squared norm", n, bytes_of(x), lambda: flat.squares(module, [x]))
    yield Job("scale_", n, 2 * bytes_of(x), lambda: flat.scale(module, [x], 0.5))


def jobs(module: Any, dtype: torch.dtype) -> Iterator[Job]:
    """Every kind of kernel once, on tensors of this dtype."""
    for family in (_rows, _codes, _signs, _optimizers):
        yield from family(module, dtype)


def measure(module: Any, job: Job) -> Traffic:
    """Run a job under the emulator's count."""
    module.start_trace()
    try:
        job.run()
    finally:
        counts = module.stop_trace()
    accesses, asked, requested, distinct = (sum(c) for c in zip(*counts))
    return Traffic(
        job.name,
        job.needed / job.elements,
        distinct * SECTOR / job.elements,
        asked / job.elements,
        asked / (requested * SECTOR),
        asked / accesses,
    )
