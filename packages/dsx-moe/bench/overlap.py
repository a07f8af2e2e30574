"""How much of the all-to-all's time is not hidden behind the experts. The link has a known speed; experts sleep.

    python packages/dsx-moe/bench/overlap.py [--chunks 1 2 4 8] [--json FILE]

There is one process. Its rows come back to it over a `PacedLink`, and each expert sleeps in proportion to its rows. The
link and the experts take equally long in all, so a perfect overlap would hide all but the first and the last chunk. The
exposed time is the time of forward and backward without the experts' own. It is divided by the time in which the link
was busy. The last rows have shared experts beside the routed ones, which need no row from the link and take a quarter
of their time. The bench sleeps, so that a busy machine changes little; its dtype and launcher would change nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from dsx_moe.dispatch import RankReport, run_exchanged
from dsx_moe.gating import top1_gating
from dsx_testkit import PacedLink, PacedTransfer
from dsx_testkit.results import Table, add_json_option

EXPERTS, TOKENS, HIDDEN = 16, 4096, 64


class Arriving:
    """Rows in flight on a paced link."""

    def __init__(self, rows: torch.Tensor, transfer: PacedTransfer) -> None:
        self.rows, self._transfer = rows, transfer

    def wait(self) -> None:
        """Return when a real link would have delivered the rows."""
        self._transfer.wait()


class Loopback:
    """The exchange of a layer, for one rank that sends to itself."""

    size, rank = 1, 0

    def __init__(self, link: PacedLink) -> None:
        self.link = link

    def gather_counts(self, own: torch.Tensor) -> torch.Tensor:
        """The counts of all ranks, which are those of this rank."""
        return own.view(1, -1)

    def start(self, rows: torch.Tensor, traffic: torch.Tensor) -> Arriving:
        """Send the rows over the link, back to this rank."""
        return Arriving(rows.clone(), self.link.start(rows.numel() * rows.element_size()))


class Sleeps(torch.autograd.Function):
    """The identity; forward and backward sleep for `seconds` each."""

    @staticmethod
    def forward(ctx, rows, seconds):  # pyright: ignore
        """Sleep, and return the rows."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        """Sleep, and return the gradient."""
        time.sleep(ctx.seconds)
        return grad, None


def measure(chunks: int, seconds: float, shared: float) -> tuple[float, float]:
    """Run forward and backward; return (seconds without the experts' own, seconds in which the link was busy).

    `shared`: seconds of shared experts in a forward.
    """
    size = TOKENS * HIDDEN * 4
    link = PacedLink(bytes_per_second=2 * size / seconds)  # there and back in a forward take as long as the experts
    exchange = Loopback(link)

    def experts(rows: torch.Tensor, counts: Sequence[int], first: int = 0) -> torch.Tensor:
        return Sleeps.apply(rows, seconds * rows.shape[0] / TOKENS)  # type: ignore[return-value]

    routing = top1_gating(torch.randn(TOKENS, EXPERTS), drop_tokens=False).routing
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    report = RankReport(torch.cat([routing.counts, torch.tensor([0, 1])]).view(1, -1))
    beside: list[torch.Tensor] = []

    def run_shared() -> None:
        beside.append(Sleeps.apply(tokens, shared))  # type: ignore[arg-type]

    began = time.perf_counter()
    out = run_exchanged(tokens, routing, experts, exchange, report, chunks, run_shared if shared else None)
    sum([out, *beside]).sum().backward()  # type: ignore[union-attr]
    return time.perf_counter() - began - 2 * (seconds + shared), link.busy_s


def main() -> None:
    """Measure each number of chunks and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=0.4, help="time of the experts in a forward")
    add_json_option(parser)
    args = parser.parse_args()
    table = Table({"chunks": "", "shared experts": "", "exposed ms": "{:.0f}", "of the link's time": "{:.1f} %"})
    least = float("inf")
    for share in (0.0, 0.25):
        for chunks in args.chunks:
            exposed, busy = min(measure(chunks, args.seconds, share * args.seconds) for _ in range(3))
            table.add(chunks, "yes" if share else "no", exposed * 1e3, 100 * exposed / busy)
            least = least if share else min(least, exposed / busy)
    table.goal("at most 10 % exposed without shared experts", f"{least:.1%} at least", met=least <= 0.10)
    table.save(args.json)


if __name__ == "__main__":
    main()
