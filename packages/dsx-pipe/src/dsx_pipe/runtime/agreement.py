"""Messages between the ranks of a pipeline around a step: before it that they are about to do the same, at its end
the losses or what failed, and behind it whether each of them could do its part of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dsx_comm
import torch

from ..errors import PipelineError, StageError
from ..schedule import Schedule
from .failure import Failure, first_of
from .groups import Groups
from .messages import LOST
from .stage import Stage
from .step import Step

TRAIN, EVAL = 1, 2  # kinds of steps


class Agreement:
    """One rank's part in it. Every method but `name_of` is collective.

    Args:
        groups: the pipeline's groups.
        schedule: says which rank has which stages.
        stages: this rank's stages.
        everyone: group of the ranks that `together` is for, on the host; None: those of the pipeline.
    """

    def __init__(self, groups: Groups, schedule: Schedule, stages: dict[int, Stage], everyone: Any = None) -> None:
        self._groups, self._schedule, self._stages = groups, schedule, stages
        self._everyone = groups.host if everyone is None else everyone

    def name_of(self, rank: int) -> str:
        """The name in errors of a rank of the pipeline's group: its stages and its global rank."""
        stages = ", ".join(map(str, self._schedule.stages_of(rank)))
        return f"stage {stages} (rank {self._groups.ranks[rank]})"

    # - before a step

    def check_same_step(self, plan: Schedule, kind: int, run: int, *, dynamic_shape: bool) -> None:
        """Check that all ranks are about to do the same.

        Raises:
            PipelineError: on every rank, if they are not.
        """
        mine = torch.tensor([plan.digest, kind, int(dynamic_shape), run], dtype=torch.int64, device="cpu")
        rows = self._gather_rows(mine)
        if all(row == rows[0] for row in rows):
            return
        call = {TRAIN: "train_batch", EVAL: "eval_batch"}[kind]
        texts = self._gather_objects(
            f"{call}, {plan.name} with {plan.micro_batches} micro-batches over {plan.stages} stages, step {run}"
            f"{', dynamic shapes' if dynamic_shape else ''}"
        )
        listed = "\n  ".join(f"{self.name_of(r)}: {text}" for r, text in enumerate(texts))
        raise PipelineError(f"the ranks of the pipeline are not about to do the same:\n  {listed}")

    # - at the end of a step

    def end_step(self, step: Step, plan: Schedule, stands_for: int | None) -> tuple[list[float], dict[str, float]]:
        """The losses of all micro-batches, and the means of further losses by name.

        Args:
            stands_for: as of `Pipeline`.

        Raises:
            StageError: on every rank with the same text, if one of them failed.
        """
        told = step.failure_message
        if step.lost or (told and told[0] == LOST):
            raise self._failed([Failure.unpack(told[1])] if told else step.failures)
        count = plan.micro_batches if stands_for is None else stands_for
        row = torch.zeros(2 + count, dtype=torch.float64, device="cpu")  # failed, has further losses, losses
        row[0] = float(told is not None)
        last = self._stages.get(self._schedule.stages - 1)
        if last is not None and step.mode.loss and told is None:
            row[1] = float(bool(last.extras))
            row[2 : 2 + plan.micro_batches] = last.losses_on_host(plan.micro_batches)
        rows = self._gather_rows(row)
        if not any(r[0] for r in rows):
            final = rows[self._schedule.stage_ranks[-1]]
            return final[2 : 2 + plan.micro_batches], self._broadcast_extras(last) if final[1] else {}
        texts = [text for found in self._gather_objects([f.pack() for f in step.failures]) for text in found]
        failure = first_of([Failure.unpack(text) for text in texts])
        raise self._failed([self._locate_nonfinite(failure) if failure.nonfinite else failure])

    def _broadcast_extras(self, last: Stage | None) -> dict[str, float]:
        """Give every rank the means of the last stage's further losses over the micro-batches."""
        row: list[Any] = [None]
        if last is not None:
            row = [{name: sum(float(v) for v in values) / len(values) for name, values in last.extras.items()}]
        source = self._groups.ranks[self._schedule.stage_ranks[-1]]
        dsx_comm.broadcast_object_list(row, src=source, group=self._groups.host)
        return row[0]

    def _locate_nonfinite(self, failure: Failure) -> Failure:
        """Find where a loss stopped being finite: the first stage whose input is finite and whose output is not."""
        found = None
        for index, stage in sorted(self._stages.items()):
            if failure.micro_batch is None or found is not None:
                break
            try:
                place = stage.where_nonfinite(failure.micro_batch)
            except Exception:  # noqa: BLE001  (the search must not hide the failure that it explains)
                continue
            if place is not None:
                found = (index, self._groups.world_rank, *place)
        known = sorted(tuple(answer) for answer in self._gather_objects(found) if answer is not None)
        if not known:
            return failure
        index, rank, what, layer = known[0]
        reason = f"{failure.reason}; this is the first stage where {what} are not finite"
        return Failure(index, rank, failure.micro_batch, layer, "forward", reason, nonfinite=True)

    def _failed(self, failures: list[Failure]) -> StageError:
        """Drop everything that the failed step has kept, and return the error to raise."""
        for stage in self._stages.values():
            stage.begin()
        return first_of(failures).error()

    # - behind a step

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """See `Pipeline.together`."""
        failure: Exception | None = None
        try:
            yield
        except dsx_comm.CommError:
            raise  # communication has failed: there is nothing to tell the others by
        except Exception as error:  # noqa: BLE001  (every rank must be told, whatever the error is)
            failure = error
        flag = torch.tensor([failure is not None], dtype=torch.int32, device="cpu")
        try:
            dsx_comm.all_reduce(flag, op=dsx_comm.ReduceOp.MAX, group=self._everyone)
            if not flag.item():
                return
            told = dsx_comm.together(self._everyone).gather(None if failure is None else self._describe(doing, failure))
        except RuntimeError as error:
            raise self._gone(error) from failure or error
        raise first_of([Failure.unpack(text) for text in told if text is not None]).error() from failure

    def _describe(self, doing: str, error: Exception) -> bytes:
        """The failure of this rank in a block of `together`, packed."""
        reason = f"{type(error).__name__}: {error}"
        return Failure(min(self._stages), self._groups.world_rank, None, None, doing, reason).pack()

    # - messages

    def _gather_rows(self, row: torch.Tensor) -> list[list[Any]]:
        """The rows of all ranks, by rank."""
        table = torch.empty((self._groups.size, row.numel()), dtype=row.dtype, device="cpu")
        try:
            dsx_comm.all_gather_into_tensor(table.view(-1), row, group=self._groups.host)
        except RuntimeError as error:
            raise self._gone(error) from error
        return table.tolist()

    def _gather_objects(self, mine: Any) -> list[Any]:
        """The object that each rank passed, by rank."""
        return dsx_comm.together(self._groups.host).gather(mine)

    @staticmethod
    def _gone(error: RuntimeError) -> PipelineError:
        what = "has not come to this step" if isinstance(error, dsx_comm.errors.HangError) else "is gone"
        return PipelineError(f"a rank of the pipeline {what}: {type(error).__name__}: {error}")
