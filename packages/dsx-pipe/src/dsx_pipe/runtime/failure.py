"""The failure of a stage: data that is sent to the other ranks, from which every rank makes the same error."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import TracebackType

from torch import nn

from ..errors import StageError


@dataclass(frozen=True)
class Failure:
    """The place and the reason of a failure.

    Attributes:
        stage: index of the stage; None if it is not known.
        rank: global rank, by which a launcher names its output.
        micro_batch: index of the micro-batch; None if it failed outside a micro-batch.
        layer: name of the layer; None if it is not known.
        operation: what failed, such as "forward", "backward" or "loading data".
        reason: text of the error.
        nonfinite: True if a loss was not finite; the ranks then look for the layer where that began.
    """

    stage: int | None
    rank: int
    micro_batch: int | None
    layer: str | None
    operation: str
    reason: str
    nonfinite: bool = False

    def pack(self) -> bytes:
        """The failure as bytes."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def unpack(data: bytes) -> Failure:
        """The failure from the bytes that `pack` made."""
        return Failure(**json.loads(data))

    def error(self) -> StageError:
        """The error with this information. Its text is the same on every rank."""
        where = f"stage {self.stage} (rank {self.rank})" if self.stage is not None else f"rank {self.rank}"
        if self.layer is not None:
            where += f", layer {self.layer}"
        if self.micro_batch is not None:
            where += f", micro-batch {self.micro_batch}"
        return StageError(
            f"{where}: {self.operation} failed: {self.reason}",
            stage=self.stage, rank=self.rank, micro_batch=self.micro_batch, layer=self.layer,
        )  # fmt: skip


def first_of(failures: list[Failure]) -> Failure:
    """Choose the failure to report: that of the earliest micro-batch, and among those of the earliest stage."""

    def order(failure: Failure) -> tuple[int, int]:
        micro_batch = -1 if failure.micro_batch is None else failure.micro_batch
        return micro_batch, -1 if failure.stage is None else failure.stage

    return min(failures, key=order)


def layer_of(module: object, traceback: TracebackType | None) -> str | None:
    """Name of the innermost submodule that was running when an exception was raised, with its class."""
    if not isinstance(module, nn.Module):
        return None
    names = {id(m): n for n, m in module.named_modules() if n}
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = f"{names[id(owner)]} ({type(owner).__name__})"
        traceback = traceback.tb_next
    return found
