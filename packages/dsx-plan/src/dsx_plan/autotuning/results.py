"""Results of a search, as rows, as text and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .experiments import Outcome
from .predictions import Facts, Prediction, score_of
from .space import Candidate

__all__ = ["Result", "Row", "metric_text", "shown_metric"]

UNITS = {"throughput": "samples/s", "latency": "ms/update", "FLOPS": "GFLOPS/device"}


def shown_metric(metric: str) -> str:
    """The metric under the one spelling that is shown."""
    return "FLOPS" if metric.lower() == "flops" else metric


@dataclass(frozen=True)
class Row:
    """One experiment.

    Attributes:
        name: the folder's name.
        candidate: what was tried.
        outcome: how it ended.
        prediction: what was expected; None if nothing was.
        first: it is the first experiment, which looks at the model.
    """

    name: str
    candidate: Candidate
    outcome: Outcome
    prediction: Prediction | None = None
    first: bool = False


@dataclass(frozen=True)
class Result:
    """A search, over or not.

    Attributes:
        metric: "throughput", "latency" or "FLOPS".
        rows: experiments in the order in which they were made.
        facts: what is known of the model and the machine.
        stopped: why no more were made; empty while the search goes on.
        left_out: sentences about what was not tried.
    """

    metric: str
    rows: tuple[Row, ...]
    facts: Facts
    stopped: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Row | None:
        """The experiment with the best metric; the first of equal ones; None if none worked."""
        worked = [row for row in self.rows if row.outcome.metrics is not None]
        return max(worked, key=lambda row: self.score(row) or 0.0, default=None)

    def score(self, row: Row) -> float | None:
        """The score of a row, larger is better; None for an experiment that failed."""
        metrics = row.outcome.metrics
        if metrics is None:
            return None
        return 1 / metrics["latency"] if self.metric == "latency" else metrics["throughput"]

    def value(self, row: Row) -> float | None:
        """The metric in the unit in which it is shown."""
        score = self.score(row)
        return None if score is None else self._shown(score)

    def expected(self, row: Row) -> float | None:
        """The predicted metric in the unit in which it is shown."""
        if row.prediction is None:
            return None
        seconds, ranks = row.prediction.step_seconds, self.facts.data_parallel
        return self._shown(score_of(row.candidate, seconds, ranks, self.metric))

    def _shown(self, score: float) -> float:
        if self.metric == "latency":
            return 1e3 / score
        if self.metric == "FLOPS":
            return score * (self.facts.flops_per_sample or 0.0) / self.facts.world_size / 1e9
        return score

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        best = self.best
        return {
            "metric": self.metric,
            "unit": UNITS[self.metric],
            "best": None if best is None else best.name,
            "stopped": self.stopped,
            "left_out": list(self.left_out),
            "facts": self.facts.to_json(),
            "experiments": [self._row_json(row) for row in self.rows],
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "changes": row.candidate.changes,
            "value": self.value(row),
            "predicted": self.expected(row),
            "predicted_by": None if row.prediction is None else row.prediction.source,
            "metrics": None if row.outcome.metrics is None else dict(row.outcome.metrics),
            "reason": row.outcome.reason,
            "seconds": row.outcome.seconds,
        }

    def text(self) -> str:
        """Two tables: what each stage came to, and every experiment."""
        best = self.best
        parts = [_table(("tuning_space", "num_experiments", "best_metric_val", "best_exp_name"), self._spaces())]
        unit = UNITS[self.metric]
        head = ("experiment", f"{self.metric} ({unit})", "predicted", "peak memory (MiB)", "outcome")
        parts.append(_table(head, [self._line(row, best) for row in self.rows]))
        if self.stopped:
            parts.append(f"The search ended: {self.stopped}.")
        parts += self.left_out
        if best is not None:
            parts.append(f"Best: {best.name}, {metric_text(self.value(best))} {unit}{self._gain(best)}.")
        return "\n\n".join(parts) + "\n"

    def _gain(self, best: Row) -> str:
        """Text of the gain over the first experiment; "" if that is the best one or has no score."""
        first = next((row for row in self.rows if row.first), None)
        if first is None or first is best or not self.score(first):
            return ""
        return f" ({(self.score(best) or 0.0) / (self.score(first) or 1.0):.2f} times the first experiment)"

    def _spaces(self) -> list[tuple[str, ...]]:
        lines = []
        for stage in sorted({row.candidate.stage for row in self.rows}):
            rows = [row for row in self.rows if row.candidate.stage == stage]
            top = Result(self.metric, tuple(rows), self.facts).best
            value, name = ("-", "-") if top is None else (metric_text(self.value(top)), top.name)
            lines.append((f"z{stage}", str(len(rows)), value, name))
        return lines

    def _line(self, row: Row, best: Row | None) -> tuple[str, ...]:
        metrics: Mapping[str, Any] = row.outcome.metrics or {}
        peak = f"{metrics['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in metrics else "-"
        outcome = row.outcome.reason or ("best" if row is best else "measured")
        return row.name, metric_text(self.value(row)), metric_text(self.expected(row)), peak, outcome


def metric_text(value: float | None) -> str:
    """A number with four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
