"""What benches share: the frame of a bench of several parts, one GPT with its data, steps that take turns, and systems
that are started as their users start them.

Steps that are compared run in the same processes, one of each in turn, so that a disturbance of the machine meets all
of them; their medians and paired ratios are what a machine that drifts still tells. Whole systems, whose launchers and
transports count too, run in processes of their own (`start_system`), and whole rounds take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from dsx_testkit.results import Table, add_json_option

__all__ = [
    "GPT", "PRECISIONS", "Block", "Turns", "batch", "deepspeed", "losers_first", "report_and_leave", "run_parts",
    "run_systems", "spawn_ranks", "start_system", "take_turns",
]  # fmt: skip

PRECISIONS = ("fp32", "bf16")
"""What people train in; a bench with peers has a table for each."""


def run_parts(parts: Mapping[str, Callable[[bool], Table]], description: str | None) -> None:
    """The command of a bench of several parts: the names of those to run (default: all), `--small` and `--json FILE`.

    Args:
        parts: each measures and returns its table, which has a name: with `--json` each goes to a file of its own. The
            argument says whether to run at a size that only shows that it works.
        description: for `--help`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(parts)}; default: all")
    parser.add_argument("--small", action="store_true", help="a size that only shows that it works")
    add_json_option(parser)
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in parts]
    if unknown:
        parser.error(f"got {unknown[0]!r}, expected some of {', '.join(parts)}")
    for name in chosen.parts or parts:
        print(f"# {name}", flush=True)
        parts[name](chosen.small).save(chosen.json)


def deepspeed() -> Any:
    """DeepSpeed itself, on its CPU accelerator.

    dsx-compat answers to the same import, so that a bench in an environment with it would compare dsx with dsx.

    Raises:
        ImportError: it is not installed, or dsx-compat stands in its place.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as library  # pyright: ignore[reportMissingImports]

    if "dsx_compat" in str(library.__file__):
        raise ImportError("got dsx-compat as `deepspeed`, expected DeepSpeed; take an environment without dsx-compat")
    return library


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss of next-byte prediction. By default 19 M parameters."""

    def __init__(
        self, width: int = 512, layers: int = 6, heads: int = 8, vocabulary: int = 256, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """ids, targets [batch, length] int64 -> scalar loss."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(step: int, rank: int, size: int = 4, length: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and the bytes that follow them, [size, length] int64. Drawn from (step, rank), alike for every system."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, 256, (size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass
class Turns:
    """What was measured, by name: `ms` of each step, and what each step returned."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.ms[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as long the step `other` took: the median over pairs of steps of one turn."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ms[name], self.ms[other]))

    def apart(self, name: str, other: str) -> float:
        """The greatest difference of their losses."""
        return max(abs(a - b) for a, b in zip(self.losses[name], self.losses[other]))


def take_turns(steps: Mapping[str, Callable[[int], float]], count: int, *, warmup: int = 3) -> Turns:
    """Run `warmup + count` turns of one step of each, and time the last `count`. The order alternates.

    Args:
        steps: each is called with the number of the turn, on every rank, and returns its loss.
    """
    found = Turns({name: [] for name in steps}, {name: [] for name in steps})
    for turn in range(warmup + count):
        for name in sorted(steps, reverse=bool(turn % 2)):
            dist.barrier()
            began = time.perf_counter()
            loss = steps[name](turn)
            dist.barrier()
            found.losses[name].append(loss)
            if turn >= warmup:
                found.ms[name].append((time.perf_counter() - began) * 1e3)
    return found


def spawn_ranks(worker: Callable[..., Any], ranks: int, *arguments: Any) -> None:
    """Run `worker(rank, store, *arguments)` in `ranks` processes of one thread; `store` is the name of a file for
    `init_method="file://..."`.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (worker, os.path.join(folder, "store"), arguments)
        mp.spawn(_one_thread, arguments, ranks)  # pyright: ignore[reportPrivateImportUsage]


def _one_thread(rank: int, worker: Callable[..., Any], store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worker(rank, store, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def start_system(program: Sequence[str], name: str, *, processes: int, launcher: str = "torchrun") -> dict[str, Any]:
    """Run a program as users do, and return what its rank 0 gave to `report_and_leave`.

    Each process has one thread, and nothing else is set.

    Args:
        program: the script and its arguments; "--out FILE" is added.
        name: of the system, for the line that says why it did not run.
        launcher: "torchrun", or "dsx": `dsx launch`. One process is started without either.

    Returns:
        What was reported; empty where the system did not run. Its last words are shown then.
    """
    start = [sys.executable]
    if launcher == "dsx":
        start += ["-m", "dsx", "launch", "--no_local_rank", "--num_procs", str(processes)]
    elif processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [*start, *program, "--out", str(out)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
        if done.returncode or not out.exists():
            sys.stdout.write(f"  {name}: did not run: {(done.stdout + done.stderr)[-600:]}\n")
            return {}
        return json.loads(out.read_text())


def run_systems(
    systems: Mapping[str, tuple[int, str]],
    program: Callable[[str, str], Sequence[str]],
    *,
    rounds: int,
    precisions: Sequence[str] = PRECISIONS,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each system reported in each round, by precision and name. Within a round they take turns.

    Args:
        systems: by name its processes and launcher, as of `start_system`.
        program: (name, precision) -> the script and its arguments. What it reports has "ms".
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {p: {name: [] for name in systems} for p in precisions}
    for number in range(rounds):
        for precision in precisions:
            for name, (processes, launcher) in systems.items():
                got = start_system(program(name, precision), name, processes=processes, launcher=launcher)
                if got:
                    found[precision][name].append(got)
                    sys.stdout.write(f"  round {number + 1}: {precision}, {name}: {got['ms']:.0f} ms\n")
                    sys.stdout.flush()
    sys.stdout.write(f"\nmedians of {rounds} rounds\n")
    return found


def report_and_leave(out: str, found: Mapping[str, Any]) -> NoReturn:
    """Give a system's figures, with the transport that it got, to `start_system`, and end this process. All ranks call
    it. Peers leave threads and groups behind, whose end is not what is measured.
    """
    if os.environ.get("RANK", "0") == "0":
        backend = dist.get_backend() if dist.is_initialized() and dist.get_world_size() > 1 else ""
        transport = backend.replace("undefined", "gloo")  # torch's name for its default of several
        Path(out).write_text(json.dumps({**found, "transport": transport}))
    if dist.is_initialized():
        dist.barrier()  # a launcher ends the others when the first has ended
    os._exit(0)


def losers_first(rows: Iterable[tuple[Any, ...]], *ratios: int) -> list[tuple[Any, ...]]:
    """Rows of a table, those first that a peer beats: one of the cells at the places `ratios`, which say how many times
    as long the peer took, is below 1.
    """
    return sorted(rows, key=lambda row: not any(row[i] is not None and row[i] < 1.0 for i in ratios))
