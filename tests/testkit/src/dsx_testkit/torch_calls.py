"""The same training script on a plain model in one process and on a sharded model, compared call by call.

A `Row` is one thing that PyTorch users do, as a function of a `Training`. `outcomes` runs it on the ranks for a sharded
model with each rank's part of the batch, and in each rank for a plain model with the whole batch, and says whether the
weights are the same afterwards, or what was raised.
"""

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_PER_RANK = 2
_WORDS = {"same": "works", "differs": "as DDP"}


class Net(nn.Module):
    """155 parameters in three layers, two of them in a list, with weights drawn from `seed`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 6) to (batch, 3)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@dataclass(frozen=True)
class Row:
    """One thing that PyTorch users do.

    Attributes:
        name: as documented: the first cell of its line in the table of the README.
        run: does it; what it asserts has to hold for the plain model too.
        raises: what a sharded model raises: a part of the text, for all stages or by stage. Where there is none it
            works.
        optimizer: from parameters to an optimizer.
        variant: tells the rows that share a line of the table apart.
    """

    name: str
    run: Callable[["Training"], None]
    raises: str | Mapping[int, str] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.3, momentum=0.9
    )
    variant: str = ""

    @property
    def label(self) -> str:
        """What tells this row from all others."""
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def expected(self, stage: int) -> str:
        """What the row should come to: "same", or a part of the error's text (or of "differs by ...", where it is as
        under DDP).
        """
        return self.raises if isinstance(self.raises, str) else self.raises.get(stage, "same")


class Training:
    """A model, its optimizer and batches. `stage` None: a plain model, one process."""

    def __init__(self, row: Row, rank: int, world: int, stage: int | None, dtype: torch.dtype) -> None:
        self.rank, self.world, self.stage, self.dtype = rank, world, stage, dtype
        self.model, self.sharded = Net().to(dtype), stage is not None
        if stage is None:
            self.optimizer = row.optimizer(self.model.parameters())
        else:
            import dsx_zero

            config = {"stage": stage, "stage3_param_persistence_threshold": 0}
            self.model, self.optimizer = dsx_zero.shard(self.model, row.optimizer, config=config)

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets: this rank's, or those of all ranks."""
        generator = torch.Generator().manual_seed(100 + index)
        x = torch.randn(_PER_RANK * self.world, 6, generator=generator)
        y = torch.randn(_PER_RANK * self.world, 3, generator=generator)
        mine = slice(_PER_RANK * self.rank, _PER_RANK * (self.rank + 1)) if self.sharded else slice(None)
        return x[mine].to(self.dtype), y[mine]

    def loss(self, index: int, model: Any = None) -> torch.Tensor:
        """The mean loss of a batch; the mean of the ranks' is that of the plain model."""
        x, y = self.batch(index)
        return nn.functional.mse_loss((self.model if model is None else model)(x).float(), y)

    def step(self) -> None:
        """The end of an update."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int = 2, first: int = 50) -> None:
        """A few ordinary steps."""
        for index in range(first, first + steps):
            self.loss(index).backward()
            self.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, in fp32."""
        found = {}
        for name, parameter in self.model.named_parameters():
            gather: Any = getattr(parameter, "full_tensor", None)  # a partitioned parameter has it
            whole = parameter if gather is None else gather()
            found[name] = whole.detach().float().clone()
        return found


def outcomes(
    rank: int, world: int, rows: Sequence[Row], stage: int, dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """What becomes of each row at a stage: "same", "differs by ...", or what was raised."""
    warnings.simplefilter("ignore")
    return {row.label: _outcome(row, rank, world, stage, dtype) for row in rows}


def _outcome(row: Row, rank: int, world: int, stage: int, dtype: torch.dtype) -> str:
    plain = Training(row, rank, world, None, dtype)
    row.run(plain)
    training = None
    try:
        training = Training(row, rank, world, stage, dtype)
        row.run(training)
        found, wanted = training.weights(), plain.weights()
    except Exception as error:
        return f"raises {type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        if training is not None:
            training.optimizer.release()  # type: ignore[attr-defined]
    if set(found) != set(wanted):
        return f"other names: {sorted(set(found) ^ set(wanted))}"
    apart = max(float((found[name] - wanted[name]).abs().max()) for name in found)
    return "same" if apart <= (1e-5 if dtype == torch.float32 else 4e-2) else f"differs by {apart:.3g}"


def unexpected(rows: Sequence[Row], stage: int, by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """The rows that came to something else than they say, as text."""
    return [
        f"{row.label} (stage {stage}, rank {rank}): expected {row.expected(stage)!r}, got {found[row.label]}"
        for row in rows
        for rank, found in enumerate(by_rank)
        if not _fits(row.expected(stage), found[row.label])
    ]


def worse(rows: Sequence[Row], stage: int, found: Mapping[str, str]) -> list[str]:
    """The rows that do worse on one rank than documented: another result, or an error where it says "works"."""
    return [
        f"{row.label} (stage {stage}): expected {row.expected(stage)!r} or 'same', got {found[row.label]}"
        for row in rows
        if found[row.label] != "same" and (row.expected(stage) == "same" or found[row.label].startswith("differs"))
    ]


def _fits(expected: str, found: str) -> bool:
    return found == "same" if expected == "same" else expected in found


def misdocumented(rows: Sequence[Row], readme: str, section: str) -> list[str]:
    """Where the table under the heading `section` says something else than the rows, which are tested: as text.

    A line of the table is `| name | stage 0 | stages 1 and 2 | stage 3 | text |`, with "works", "raises" or "as DDP"
    for a stage.
    """
    table = readme.partition(f"\n### {section}\n")[2].partition("\n#")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("| ")
    ]
    documented = {name: [*cells[:2], *cells[1:3]] for name, *cells in lines[1:]}
    wrong = [f"tested, not documented: {name}" for name in {row.name for row in rows} - set(documented)]
    wrong += [f"documented, not tested: {name}" for name in set(documented) - {row.name for row in rows}]
    for row in rows:
        is_so = [_WORDS.get(row.expected(stage), "raises") for stage in range(4)]
        if (said := documented.get(row.name, is_so)) != is_so:
            wrong.append(f"{row.label}: documented as {said}, is {is_so}")
    return wrong
