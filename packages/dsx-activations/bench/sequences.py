"""Attention over sequence shards in time: what is not hidden behind the computation, and peers in the same run.

    python packages/dsx-activations/bench/sequences.py [overlap] [peers] [--small] [--json FILE]

`overlap`: one process, whose messages come back to it over a `PacedLink`, and whose attention sleeps in proportion to
its heads. Link and attention take equally long in all. Exposed is the time of forward and backward without the
attention's own, as a share of the time in which the link was busy. A perfect overlap exposes the first message there
and the last one back.

`peers`: attention with gradients over one sequence on two processes, by turns: dsx by heads and as a ring, DeepSpeed's
`DistributedAttention`, PyTorch's `context_parallel`; and one process with the whole sequence; in fp32 and in bf16. All
are in the same processes and over the same transport, so that launchers change nothing. Peers that are not installed,
or that cannot compute on this machine, have their reason in the row; rows that a peer beats come first. Nothing else
should run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dsx_activations
import torch
import torch.distributed as dist
from dsx_activations.attention import swapping
from dsx_activations.attention.facts import Facts
from dsx_activations.attention.ulysses import attend_by_heads
from dsx_testkit import PacedLink, PacedTransfer, run_ranks
from dsx_testkit.benches import PRECISIONS, deepspeed, losers_first, run_parts, take_turns
from dsx_testkit.results import Table
from torch.nn import functional as F

HEADS, FEATURES = 32, 16


# - overlap


class Arriving:
    """A message in flight."""

    def __init__(self, transfer: PacedTransfer) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        """Return when a real link would have delivered it."""
        self._transfer.wait()


@contextmanager
def looped_back(link: PacedLink) -> Iterator[None]:
    """Inside, exchanges of tokens for heads give each rank what it sent, when the link would have brought it."""
    comm = swapping.dsx_comm

    class Loopback:
        @staticmethod
        def all_to_all_single(arrived: torch.Tensor, leaving: torch.Tensor, *sizes: Any, **more: Any) -> Arriving:
            arrived.copy_(leaving)
            return Arriving(link.start(leaving.numel() * leaving.element_size() // 2))  # half of it stays on the rank

    swapping.dsx_comm = Loopback  # type: ignore[assignment]
    try:
        yield
    finally:
        swapping.dsx_comm = comm


class Sleeps(torch.autograd.Function):
    """The identity; forward and backward sleep for `seconds` and twice as long."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep, and return the queries."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep, and return the gradient."""
        time.sleep(2 * ctx.seconds)
        return grad, None


def exposed(overlap: int, seconds: float, tokens: int) -> float:
    """Time of forward and backward without the attention's own, of the link's."""
    size = tokens * HEADS * FEATURES * 4
    link = PacedLink(bytes_per_second=4 * size / 2 / seconds)  # q, k, v there and the result back, half of each
    segments = (((0, tokens),), ((tokens, 2 * tokens),))
    facts = Facts(None, 0, 2, segments, 2 * tokens, (0, 1), 2)
    q, k, v = (torch.randn(1, HEADS, tokens, FEATURES, requires_grad=True) for _ in range(3))

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int], key: int) -> torch.Tensor:
        return Sleeps.apply(q, seconds * q.shape[1] / (HEADS // 2)) + 0.0 * (k + v)  # type: ignore[no-any-return]

    with looped_back(link):
        began = time.perf_counter()
        attend_by_heads(q, k, v, facts, local, overlap).sum().backward()
        return (time.perf_counter() - began - 3 * seconds) / link.busy_s


def overlap(small: bool) -> Table:
    """Exposed communication by the number of messages."""
    seconds, tokens, counts = (0.02, 64, (1, 4)) if small else (0.6, 512, (1, 2, 4, 8, 16))
    table = Table({"messages": "", "exposed, of the link's time": "{:.1%}"}, "overlap")
    least = float("inf")
    for count in counts:
        share = min(exposed(count, seconds, tokens) for _ in range(1 if small else 3))
        table.add(count, share)
        least = min(least, share)
    table.goal("at most 10 % exposed", f"{least:.1%} at least", met=least <= 0.1)
    return table


# - peers


def of_dsx(team: int | None, length: int) -> Callable[..., torch.Tensor]:
    """Attention of dsx, in teams of so many ranks."""
    return lambda q, k, v: dsx_activations.sequence_attention(
        q, k, v, causal=True, length=length, team=team, order="plain" if team is None else "zigzag"
    )


def of_deepspeed() -> Callable[..., torch.Tensor]:
    """DeepSpeed's attention by heads."""
    deepspeed()
    from deepspeed.sequence.layer import DistributedAttention  # pyright: ignore[reportMissingImports]

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    attend = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: attend(*(t.transpose(1, 2) for t in (q, k, v)), 0).transpose(1, 2)


def of_torch() -> Callable[..., torch.Tensor]:
    """PyTorch's context parallelism."""
    if not torch.cuda.is_available():
        raise RuntimeError("has no attention for a CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with context_parallel(mesh):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def steps_of(rank: int, world: int, heads: int, length: int, count: int, precision: str) -> dict[str, float | str]:
    """Milliseconds of a forward and backward by system, or why there are none."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    whole = [torch.randn(1, heads, length, 64, device=device, dtype=dtype) for _ in range(3)]
    mine = [dsx_activations.shard_sequence(t, dim=2) if world > 1 else t for t in whole]
    makers: dict[str, Callable[[], Callable[..., torch.Tensor]]]
    if world == 1:
        makers = {"one process": lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)}
    else:
        makers = {
            "dsx, by heads": lambda: of_dsx(None, length), "dsx, ring": lambda: of_dsx(1, length),
            "DeepSpeed": of_deepspeed, "PyTorch": of_torch,
        }  # fmt: skip
    steps: dict[str, Callable[[int], float]] = {}
    found: dict[str, float | str] = {}
    for name, make in makers.items():
        try:
            attend = make()
        except (ImportError, RuntimeError) as error:
            found[name] = str(error)
            continue

        def step(number: int, attend: Callable[..., torch.Tensor] = attend) -> float:
            out = attend(*(t.detach().requires_grad_() for t in mine)).square().mean()
            out.backward()
            return out.item()

        steps[name] = step
    turns = take_turns(steps, count)
    return {**found, **{name: turns.median(name) for name in steps}}


def peers(small: bool) -> Table:
    """Two processes beside one."""
    heads, length, count = (4, 64, 2) if small else (8, 4096, 20)
    table = Table(
        {"dtype": "", "attention": "", "ms per step": "{:.2f}", "of half of one process": "{:.2f}x",
         "best peer takes": "{:.2f}x", "why not": ""}, "peers"
    )  # fmt: skip
    for precision in PRECISIONS:
        (alone,) = run_ranks(steps_of, 1, heads, length, count, precision, timeout=600)
        ranks = run_ranks(steps_of, 2, heads, length, count, precision, timeout=600)
        half = float(alone["one process"]) / 2
        slowest = {n: max(float(r[n]) for r in ranks) for n, ms in ranks[0].items() if not isinstance(ms, str)}
        best = min((ms for name, ms in slowest.items() if not name.startswith("dsx")), default=None)
        rows: list[tuple[Any, ...]] = [(precision, "one process", 2 * half, 2.0, None, None)]
        for name, ms in slowest.items():
            ratio = best / ms if best and name.startswith("dsx") else None
            rows.append((precision, name, ms, ms / half, ratio, None))
        for row in losers_first(rows, 4):
            table.add(*row)
        for name, reason in ranks[0].items():
            if name not in slowest:
                table.add(precision, name, None, None, None, str(reason))
        ratio = slowest["dsx, by heads"] / half
        text = f"{precision}: by heads at most 1.08 of half of one process"
        table.goal(text, f"{ratio:.2f}x", met=ratio <= 1.08)
    return table


if __name__ == "__main__":
    run_parts({"overlap": overlap, "peers": peers}, __doc__)
