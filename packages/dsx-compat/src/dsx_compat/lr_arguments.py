"""Command-line options for the schedules, and functions from options to a ``scheduler`` section.

``add_tuning_arguments(parser)`` adds one option per schedule argument; ``get_config_from_args`` turns the parsed
options into ``{"type": ..., "params": {...}}``; the ``override_*`` helpers copy options into an existing section's
parameters. An option that was not given on the command line is None and overrides nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "override_1cycle_params",
    "override_lr_range_test_params", "override_params", "override_warmupLR_params", "parse_arguments",
]  # fmt: skip


@dataclass(frozen=True)
class _Option:
    name: str
    kind: Callable[[str], Any]
    help: str


def _switch(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")


RANGE_TEST = (
    _Option("lr_range_test_min_lr", float, "rate at the start (0.001)"),
    _Option("lr_range_test_step_rate", float, "growth per unit (1.0)"),
    _Option("lr_range_test_step_size", int, "steps per unit (2000)"),
    _Option("lr_range_test_staircase", _switch, "grow once per unit (false)"),
)
ONE_CYCLE = (
    _Option("cycle_first_step_size", int, "steps of the rise (2000)"),
    _Option("cycle_first_stair_count", int, "stairs of the rise (0: straight)"),
    _Option("cycle_second_step_size", int, "steps of the fall (as the rise)"),
    _Option("cycle_second_stair_count", int, "stairs of the fall (as the rise)"),
    _Option("decay_step_size", int, "steps per unit of decay after the cycle (0: none)"),
    _Option("cycle_min_lr", float, "rate at the ends of the cycle"),
    _Option("cycle_max_lr", float, "rate at the top of the cycle"),
    _Option("decay_lr_rate", float, "decay of the rate after the cycle (0)"),
    _Option("cycle_momentum", _switch, "cycle the momentum too (true)"),
    _Option("cycle_min_mom", float, "least momentum (0.8)"),
    _Option("cycle_max_mom", float, "greatest momentum (0.9)"),
    _Option("decay_mom_rate", float, "decay of the momentum after the cycle (0)"),
)
WARMUP = (
    _Option("warmup_min_lr", float, "rate at the first update (0)"),
    _Option("warmup_max_lr", float, "rate after the warm-up (0.001)"),
    _Option("warmup_num_steps", int, "steps of the warm-up (1000)"),
    _Option("warmup_type", str, "log or linear (log)"),
)
WARMUP_COSINE = (
    _Option("warmup_min_ratio", float, "factor at the first update (0)"),
    _Option("cos_min_ratio", float, "factor at the end (0.0001)"),
)
TOTAL = (_Option("total_num_steps", int, "steps of the whole run"),)

_BY_SCHEDULE: dict[str, tuple[_Option, ...]] = {
    "LRRangeTest": RANGE_TEST,
    "OneCycle": ONE_CYCLE,
    "WarmupLR": WARMUP,
    "WarmupDecayLR": TOTAL + WARMUP,
    "WarmupCosineLR": TOTAL + WARMUP[2:] + WARMUP_COSINE,
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of all schedules to ``parser``, in a separate group, and return ``parser``."""
    group = parser.add_argument_group("learning-rate schedule", "choose with --lr_schedule; defaults in brackets")
    group.add_argument("--lr_schedule", choices=list(_BY_SCHEDULE), default=None, help="which schedule to use")
    for option in RANGE_TEST + ONE_CYCLE + WARMUP + WARMUP_COSINE + TOTAL:
        group.add_argument(f"--{option.name}", type=option.kind, default=None, help=option.help)
    return parser


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the schedule options in ``argv`` (default: the command line); return them and the other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args(argv)


def override_params(args: argparse.Namespace, params: MutableMapping[str, Any], schedule: str) -> None:
    """Copy the options of ``schedule`` that were given on the command line into ``params``."""
    for option in _BY_SCHEDULE[schedule]:
        value = getattr(args, option.name, None)
        if value is not None:
            params[option.name] = value


def override_lr_range_test_params(args: argparse.Namespace, params: MutableMapping[str, Any]) -> None:
    """Copy the ``LRRangeTest`` options that were given into ``params``."""
    override_params(args, params, "LRRangeTest")


def override_1cycle_params(args: argparse.Namespace, params: MutableMapping[str, Any]) -> None:
    """Copy the ``OneCycle`` options that were given into ``params``."""
    override_params(args, params, "OneCycle")


def override_warmupLR_params(args: argparse.Namespace, params: MutableMapping[str, Any]) -> None:
    """Copy the ``WarmupLR`` options that were given into ``params``."""
    override_params(args, params, "WarmupLR")


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Build a ``scheduler`` section from parsed options.

    Returns:
        The section and None, or None and the reason why there is none.
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule is not given"
    if name not in _BY_SCHEDULE:
        return None, f"--lr_schedule {name} is not one of {', '.join(_BY_SCHEDULE)}"
    params: dict[str, Any] = {}
    override_params(args, params, name)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the first rate of a ``scheduler`` section (range test) or its largest rate (others), and an explanation.

    Returns:
        The rate and the empty text, or None and the reason why there is none.
    """
    if "type" not in config:
        return None, "the schedule has no type"
    if "params" not in config:
        return None, "the schedule has no params"
    name, params = config["type"], config["params"]
    key = {
        "LRRangeTest": "lr_range_test_min_lr",
        "OneCycle": "cycle_max_lr",
        "WarmupLR": "warmup_max_lr",
        "WarmupDecayLR": "warmup_max_lr",
    }.get(name)
    if key is None:
        return None, f"{name} has no learning rate of its own"
    if params.get(key) is None:
        return None, f"{name} has no {key}"
    return params[key], ""
