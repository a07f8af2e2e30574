"""CUDA tensors through the Triton kernels; CPU tensors too under Triton's interpreter (`TRITON_INTERPRET=1`, in tests).

`forward` and `backward` describe every start of a kernel as a `Launch`: kernel, number of programs, arguments, options.
`_run` starts a launch. `ahead.py` compiles a launch without a GPU, so that its test sees exactly what a GPU would get.
`triton_table` chooses the tiles with which a kernel is started.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import derived
from ..call import AttentionCall, Gradients
from ..errors import SparseAttentionError
from ..layout import BLOCKS
from .triton_table import KERNELS, MAX_DIM, Device, Need, Tiles, column_of, fitting
from .triton_tiles import Grid, TileLists, tile_lists

__all__ = ["Launch", "backward", "forward", "launches", "refusals", "unavailable"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTALLED = importlib.util.find_spec("triton") is not None  # only looks for its folder, without importing it
_NOT_INSTALLED = "triton is not installed (pip install triton)"
_DELTA_ROWS = 64
_MAX_STRIDE = 1 << 23  # kernels multiply a row inside a tile (below 128) with the row stride in 32 bits
_PROGRAMS_PER_PROCESSOR = 4  # with fewer, query heads that share keys get separate programs


def unavailable() -> str:
    """The reason that the kernels cannot run on this machine; empty if they can. It asks for CUDA devices."""
    if not _INSTALLED:
        return _NOT_INSTALLED
    return "" if _interpreted() or torch.cuda.is_available() else "there is no CUDA device"


def refusals(call: AttentionCall) -> list[str]:
    """The reasons why the kernels cannot do this call; empty if they can."""
    why, dim = [], call.q.shape[-1]
    if not _INSTALLED:
        why.append(_NOT_INSTALLED)
    if call.q.device.type != "cuda" and not (call.q.device.type == "cpu" and _interpreted()):
        why.append(f"tensors are on {call.q.device.type}, it works on cuda")
    if call.q.dtype not in _DTYPES:
        why.append(f"got {call.q.dtype}, it knows float32, bfloat16 and float16".replace("torch.", ""))
    if _interpreted() and call.q.dtype == torch.bfloat16:
        why.append("triton's interpreter reads bfloat16 as integers")
    if call.block not in BLOCKS:
        why.append(f"got block {call.block}, it knows {', '.join(map(str, BLOCKS))}")
    if dim > MAX_DIM:
        why.append(f"got head dimension {dim}, it goes to {MAX_DIM}")
    return why or _lack_of_memory(call)


def _lack_of_memory(call: AttentionCall) -> list[str]:
    """One reason if the table has no tiles with which a kernel of this call fits into the device's shared memory."""
    device = device_of(call.q.device)
    if column_of(device.capability) is None:
        got = ".".join(map(str, device.capability))
        return [f"got a device of compute capability {got}, Triton needs 8.0 or newer"]
    lacking = [kernel for kernel in KERNELS if not fitting(_need(kernel, call), device)]
    if not lacking:
        return []
    what = f"head dimension {call.q.shape[-1]} in {call.q.dtype}".replace("torch.", "")
    what += " with a bias" if call.bias is not None else ""
    if not fitting(_need(lacking[0], call), device._replace(shared_memory=1 << 30)):
        return [f"its {lacking[0]} kernel has no tiles for {what} on this device: registers would spill"]
    return [
        f"its {lacking[0]} kernel for {what} does not fit into the {device.shared_memory} bytes of shared memory "
        "of this device"
    ]


@functools.cache
def device_of(device: torch.device) -> Device:
    """The facts of a device that the table needs. Under the interpreter: those of an H200, without a limit."""
    if device.type != "cuda":
        return Device((9, 0), 1 << 30, 132)
    found = torch.cuda.get_device_properties(device)
    return Device((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output, like q, and the log-sum-exp, float32 [batch, heads, seq]."""
    out = torch.empty_like(_last_contiguous(call.q))
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    if out.numel():
        _run(forward_launch(call, out, lse), call)
    return out, lse


def backward(call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool) -> Gradients:
    """Gradients of q, k, v; of the bias through a [batch, heads, seq, seq] buffer that is summed to its shape."""
    buffers = Buffers(call, dout, out, lse, want_bias)
    if buffers.dq.numel():
        for launch in backward_launches(call, buffers):
            _run(launch, call)
    return buffers.gradients()


def launches(call: AttentionCall) -> Iterator[_Described]:
    """The launches of a forward and backward pass. None is started; each is still without its tiles."""
    out, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3])
    yield forward_launch(call, out, lse)
    yield from backward_launches(call, Buffers(call, torch.empty_like(out), out, lse, True))


# - Buffers


class Buffers:
    """The tensors that backward reads and writes.

    If the query heads that share a key head run in several programs, k and v get one sum for each of these `parts`.
    """

    def __init__(self, call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, want_bias: bool) -> None:
        self.call = call
        self.dout, self.out, self.lse = _readable(dout), _readable(out), lse
        batch, heads, seq, dim = call.q.shape
        self.dq = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
        self.delta = torch.empty_like(lse)
        self.parts = group_parts(call)
        if self.parts == 1:
            self.dk, self.dv = (torch.empty_like(_readable(t)) for t in (call.k, call.v))
        else:
            shape = (batch, call.k.shape[1] * self.parts, seq, dim)
            self.dk, self.dv = (torch.empty(shape, dtype=torch.float32, device=call.q.device) for _ in range(2))
        self.dbias = None
        if want_bias and call.bias is not None:
            self.dbias = torch.zeros(batch, heads, seq, seq, dtype=torch.float32, device=call.q.device)

    def gradients(self) -> Gradients:
        """The sums over parts, and the bias gradient in the bias' shape."""
        call = self.call
        dk, dv = self.dk, self.dv
        if self.parts > 1:
            dk, dv = (self._summed(total, like) for total, like in ((dk, call.k), (dv, call.v)))
        bias = None if self.dbias is None or call.bias is None else self.dbias.sum_to_size(call.bias.shape)
        return Gradients(self.dq, dk, dv, bias)

    def _summed(self, total: Tensor, like: Tensor) -> Tensor:
        batch, kv_heads, seq, dim = like.shape
        found = torch.empty_like(_last_contiguous(like))
        return found.copy_(total.view(batch, kv_heads, self.parts, seq, dim).sum(2))


def group_parts(call: AttentionCall) -> int:
    """The number of parts into which the query heads of one key head are divided for the gradients of k and v: the
    smallest number that keeps the device busy.
    """
    group, device = call.group, device_of(call.q.device)
    (tiles, *_) = fitting(_need("dkv", call), device) or (None,)
    if tiles is None:
        return 1
    programs = call.k.shape[0] * call.k.shape[1] * -(-call.q.shape[2] // tiles.cols)
    wanted = _PROGRAMS_PER_PROCESSOR * device.multiprocessors
    return next((n for n in range(1, group + 1) if group % n == 0 and programs * n >= wanted), group)


def _last_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _readable(t: Tensor) -> Tensor:
    t = _last_contiguous(t)
    return t if t.stride(-2) < _MAX_STRIDE else t.contiguous()


# - Launches


class Launch(NamedTuple):
    """One start of a kernel: `kernel[(programs,)](**arguments, **options)`."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int]


class _Described(NamedTuple):
    """A launch whose tiles are not chosen yet."""

    need: Need | None  # None: the kernel has no choice of tiles
    make: Callable[[Tiles], Launch]


def forward_launch(call: AttentionCall, out: Tensor, lse: Tensor) -> _Described:
    """Writes `out` and `lse`."""

    def make(tiles: Tiles) -> Launch:
        q, k, v = map(_readable, (call.q, call.k, call.v))
        programs, arguments = _lists_and_sizes(call, tiles, columns=False, members=1)
        arguments |= {"Q": q, "K": k, "V": v, "OUT": out, "LSE": lse, **_strides(q=q, k=k, v=v, o=out)}
        return Launch(_kernels().forward_kernel, programs, arguments, tiles.options())

    return _Described(_need("forward", call), make)


def backward_launches(call: AttentionCall, buffers: Buffers) -> Iterator[_Described]:
    """sum(out * dout), then the gradient of q (and the bias), then those of k and v."""
    yield _Described(None, lambda _: _delta_launch(call, buffers))
    yield _Described(_need("dq", call), lambda tiles: _dq_launch(call, buffers, tiles))
    yield _Described(_need("dkv", call), lambda tiles: _dkv_launch(call, buffers, tiles))


def _delta_launch(call: AttentionCall, buffers: Buffers) -> Launch:
    batch, heads, seq, dim = call.q.shape
    tiles = -(-seq // _DELTA_ROWS)
    arguments = {
        "OUT": buffers.out, "DO": buffers.dout, "DELTA": buffers.delta, **_strides(o=buffers.out, do=buffers.dout),
        "heads": heads, "seq": seq, "tiles": tiles, "ROWS": _DELTA_ROWS, "D": dim, "DP": _width(dim),
    }  # fmt: skip
    return Launch(_kernels().delta_kernel, batch * heads * tiles, arguments, {"num_warps": 4, "num_stages": 1})


def _dq_launch(call: AttentionCall, buffers: Buffers, tiles: Tiles) -> Launch:
    q, k, v = map(_readable, (call.q, call.k, call.v))
    do, dq = buffers.dout, buffers.dq
    programs, arguments = _lists_and_sizes(call, tiles, columns=False, members=1)
    arguments |= {
        "Q": q, "K": k, "V": v, "DO": do, "DQ": dq, "LSE": buffers.lse, "DELTA": buffers.delta,
        "DBIAS": buffers.dbias, "WANT_BIAS": buffers.dbias is not None, **_strides(q=q, k=k, v=v, do=do, dq=dq),
    }  # fmt: skip
    return Launch(_kernels().dq_kernel, programs, arguments, tiles.options())


def _dkv_launch(call: AttentionCall, buffers: Buffers, tiles: Tiles) -> Launch:
    q, k, v = map(_readable, (call.q, call.k, call.v))
    do, dk, dv = buffers.dout, buffers.dk, buffers.dv
    members = call.group // buffers.parts
    programs, arguments = _lists_and_sizes(call, tiles, columns=True, members=members)
    arguments |= {
        "Q": q, "K": k, "V": v, "DO": do, "DK": dk, "DV": dv, "LSE": buffers.lse, "DELTA": buffers.delta,
        "members": members, "head_lines": 0 if call.layout.shape[0] == 1 else arguments["tiles"],
        **_strides(q=q, k=k, v=v, do=do, dk=dk, dv=dv),
    }  # fmt: skip
    return Launch(_kernels().dkv_kernel, programs, arguments, tiles.options())


def _lists_and_sizes(call: AttentionCall, tiles: Tiles, *, columns: bool, members: int) -> tuple[int, dict[str, Any]]:
    """(number of programs, arguments that the three kernels have in common); a program takes `members` query heads."""
    batch, heads, seq, dim = call.q.shape
    layouts = call.layout.shape[0]
    grid = Grid(seq, call.block, tiles.rows, tiles.cols, call.causal)
    together = members if layouts > 1 else 1
    lists = _lists(call.layout, grid, columns, together)
    lines = lists.order.numel()
    copies_per_batch = (heads // members) // (layouts // together)
    bias, key_bias = _float32(call.bias), _float32(call.key_bias)
    drop = call.drop_below
    arguments = {
        "STARTS": lists.starts, "ITEMS": lists.items, "BITS": lists.bits, "ORDER": lists.order,
        "BIAS": bias, "KEY_BIAS": key_bias, "SEED": call.seed, **_bias_strides(bias),
        "heads": heads, "group": call.group, "seq": seq, "tiles": lists.tiles,
        "lines": lines, "long_lines": lists.long_lines, "copies": batch * copies_per_batch,
        "copies_per_batch": copies_per_batch, "shift": call.block.bit_length() - 1,
        "cols_per_tile": grid.blocks_per_tile[1],
        "drop_below": drop - (1 << 32) if drop >= 1 << 31 else drop,  # the 32 bits of an unsigned number
        "scale": call.scale, "keep_scale": call.keep_scale,
        "ROWS": tiles.rows, "COLS": tiles.cols, "D": dim, "DP": _width(dim), "HAS_BIAS": bias is not None,
        "HAS_KEY_BIAS": key_bias is not None, "CAUSAL": call.causal, "DROPOUT": call.seed is not None,
        # Exact float32 products ("ieee") run without tensor cores and spilled 29 KB per thread; three TF32 products are
        # as exact to 1e-6 and spill nothing (test_sparse_triton_ahead.py).
        "PRECISION": "tf32x3" if call.q.dtype == torch.float32 else "ieee",
    }  # fmt: skip
    return lines * batch * copies_per_batch, arguments


def _lists(layout: Tensor, grid: Grid, columns: bool, together: int) -> TileLists:
    key = ("triton tiles", grid, columns, together)
    return derived(layout, key, lambda: tile_lists(layout, grid, columns=columns, together=together))


def _float32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32).contiguous()


def _bias_strides(bias: Tensor | None) -> dict[str, int]:
    """Batch, head and query strides, 0 where the bias is broadcast."""
    shape, strides = ((1, 1, 1), (0, 0, 0)) if bias is None else (bias.shape[:3], bias.stride()[:3])
    return {f"bias_{name}": 0 if n == 1 else s for name, n, s in zip("bhi", shape, strides)}


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Batch, head and row strides of every tensor, as the kernels name them."""
    return {f"{name}_{axis}": s for name, t in tensors.items() for axis, s in zip("bhs", t.stride()[:3])}


def _width(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _need(kernel: str, call: AttentionCall) -> Need:
    return Need(kernel, call.q.dtype == torch.float32, call.q.shape[-1], call.bias is not None, call.block)


# - Running


def _run(described: _Described, call: AttentionCall) -> None:
    """Start a kernel on the tensors' device with the first tiles that Triton lets start.

    The table's figures hold for one version of Triton; another version may need more shared memory. Then the next,
    smaller tiles are tried.

    Raises:
        SparseAttentionError: the kernel starts with no tiles of the table.
    """
    from triton.runtime.errors import OutOfResources  # lazy import: importing Triton takes a second

    device = call.q.device
    if described.need is None:
        return _start(described.make(Tiles(0, 0, 0, 0)), device)
    refused = None
    for tiles in fitting(described.need, device_of(device)):
        try:
            return _start(described.make(tiles), device)
        except OutOfResources as error:
            refused = error
    raise SparseAttentionError(
        f"Triton does not start the {described.need.kernel} kernel for {call.describe()}: {refused}; "
        'use backend="flex" or "torch", or Triton 3.7, for which its tiles were chosen'
    ) from refused


def _start(launch: Launch, device: torch.device) -> None:
    with _current(device):
        launch.kernel[(launch.programs,)](**launch.arguments, **launch.options)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one: Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels() -> Any:
    from . import triton_kernels  # lazy import: importing Triton takes a second

    return triton_kernels
