"""The result of a verification: the differences, and the first one that was too large."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsx_core import CodedError


@dataclass(frozen=True)
class Difference:
    """One value that differs from plain training.

    Attributes:
        step: number of the update, counted from 1; 0 is the state before training.
        kind: `start`, `loss`, `grad`, `skip`, `norm`, `lr`, `master` or `param`; `refused` and `stale` if dsx or torch
            must raise (1) and nothing was raised (0).
        name: the tensor's name, or the name of the number.
        rank: the rank with the largest difference.
        error: largest absolute difference.
        allowed: the tolerance that was exceeded.
        got, expected: the values at the place of the largest difference.
        where: that place, for tensors.
        said: the difference in words, where no numbers differ.
    """

    step: int
    kind: str
    name: str
    rank: int
    error: float
    allowed: float
    got: float
    expected: float
    where: tuple[int, ...] = ()
    said: str = ""

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.where))}]" if self.where else ""
        differs = self.said or (
            f"got {self.got:.8g}, expected {self.expected:.8g}"
            f" (differs by {self.error:.3g}, allowed {self.allowed:.3g})"
        )
        return f"step {self.step}, {self.kind} of {self.name}{place} on rank {self.rank}: {differs}"


@dataclass
class VerifyReport:
    """Outcome of `dsx.verify`, the same on all ranks.

    Attributes:
        steps: updates that were compared completely.
        world_size, zero_stage: the setting of the run.
        compared: how many values of each kind were compared.
        worst: for each kind the largest error, as a fraction of the allowed error.
        differences: values whose error was too large, the worst first, all from the earliest point with such values.
    """

    steps: int
    world_size: int
    zero_stage: int
    compared: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, if there is one."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        head = f"dsx.verify: ZeRO stage {self.zero_stage} on {self.world_size} ranks against plain torch"
        counts = ", ".join(f"{count} x {kind}" for kind, count in self.compared.items())
        if self.ok:
            worst = max(self.worst.items(), key=lambda item: item[1], default=("nothing", 0.0))
            return f"{head}: {self.steps} steps equal ({counts}; closest to its limit: {worst[0]} at {worst[1]:.0%})"
        lines = [f"{head}: differs", *(f"  {difference}" for difference in self.differences[:10])]
        if len(self.differences) > 10:
            lines.append(f"  ... and {len(self.differences) - 10} more at the same point")
        return "\n".join(lines)


class VerifyError(CodedError, RuntimeError):
    """Training as configured does not compute what plain torch computes; `report` says where."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.report,)
