"""The progress bar of rank 0, plain lines where output is no terminal, nothing on the other ranks."""

from __future__ import annotations

import time

import dsx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_display(engine: dsx.Engine, last_step: int) -> Silent:
    """What shows the progress of `engine` up to `last_step` on this process."""
    if engine.global_rank != 0:
        return Silent()
    console = Console()
    return (
        Bar(console, engine.global_steps, last_step) if console.is_terminal else Lines(engine.global_steps, last_step)
    )


class Silent:
    """Shows nothing; also the list of what a display does."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def step(self, report: dsx.StepReport, tokens_per_second: float | None) -> None:
        """Show the figures of a step."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Take the display off the screen."""


def figures(report: dsx.StepReport, tokens_per_second: float | None) -> str:
    """Loss, speed, learning rate and memory of a step in one line."""
    memory = dsx.monitor.memory_snapshot()
    device = f"  device {memory.cuda_allocated / 2**20:.0f} MiB" if memory.cuda_allocated else ""
    return (
        f"loss {report.loss:.3f}  {tokens_per_second or 0:,.0f} tokens/s  lr {report.lr[0]:.1e}  "
        f"memory {memory.rss / 2**20:.0f} MiB{device}"
    )


class Lines(Silent):
    """A line every few seconds."""

    def __init__(self, step: int, last_step: int) -> None:
        self._last_step, self._next = last_step, time.monotonic() + 5

    def note(self, text: str) -> None:
        """Print the line."""
        print(text, flush=True)

    def step(self, report: dsx.StepReport, tokens_per_second: float | None) -> None:
        """Print the figures if the last line was some time ago."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 5
            print(f"step {report.global_step:4d}/{self._last_step}  {figures(report, tokens_per_second)}", flush=True)


class Bar(Silent):
    """A bar with the figures beside it."""

    def __init__(self, console: Console, step: int, last_step: int) -> None:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=last_step, completed=step)

    def note(self, text: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(text, highlight=False)

    def step(self, report: dsx.StepReport, tokens_per_second: float | None) -> None:
        """Move the bar on."""
        shown = figures(report, tokens_per_second)
        self._progress.update(self._task, completed=report.global_step, description=shown)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()
