"""Realised against theoretical saving of random-LTD and of layer dropping, and the share of gather and scatter.

    python savings.py --layers 12 --width 256 --length 512 --kept 128 --repeats 5 [--json FILE]

Forward and backward of the model with and without the technique, alternating, medians. Theory: the layers'
floating-point operations, 24 s w^2 + 4 s^2 w per sample and layer with s tokens and width w (twice that in backward);
time outside of the layers is measured with a model of no layers and taken out of both sides. Aims: random-LTD >= 0.95,
layer dropping >= 0.98, gather and scatter <= 2 % of the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dsx_data import ProgressiveLayerDrop, RandomLTDScheduler, convert_to_layer_drop, convert_to_random_ltd
from dsx_data.routing import TokenDrop
from dsx_data.routing.tokens import draw_indices, gather_tokens, scatter_tokens
from dsx_testkit.results import Table, add_json_option

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_text import Block, Model


def step(model: Model, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of a forward and a backward."""
    model.zero_grad()
    begin = time.perf_counter()
    model(**batch).backward()
    return time.perf_counter() - begin


def operations(tokens: int, width: int) -> float:
    """Of one layer's forward on one sample."""
    return 24 * tokens * width**2 + 4 * tokens**2 * width


def medians(runs: list[Callable[[], float]], repeats: int) -> list[float]:
    """Of several runs each, taken in turn, so that a busy machine slows all of them; the first turn does not count."""
    turns = [[run() for run in runs] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*turns)]


def report(table: Table, name: str, seconds: tuple[float, float, float], theory: float, least: float) -> None:
    """A row, and its goal; `seconds`: plain, with the technique, outside of the layers."""
    plain, changed, outside = seconds
    realised = 1 - (changed - outside) / (plain - outside)
    table.add(name, plain * 1e3, changed * 1e3, 100 * realised, 100 * theory, realised / theory)
    table.goal(f"{name} at least {least} of theory", f"{realised / theory:.3f}", met=realised / theory >= least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "bert"), default="gpt")
    for name, value in (("layers", 12), ("width", 256), ("heads", 4), ("length", 512), ("batch", 4), ("kept", 128),
                        ("repeats", 5)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    add_json_option(parser)
    options = parser.parse_args()
    ids = torch.randint(0, 256, (options.batch, options.length))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(options.length).expand_as(ids)}
    empty = Model(argparse.Namespace(**{**vars(options), "layers": 0})).train()
    plain, ltd, dropping = (Model(options).train() for _ in range(3))
    middle = list(range(1, options.layers - 1))
    schedule = RandomLTDScheduler({
        "total_layer_num": options.layers, "random_ltd_layer_id": middle, "random_ltd_schedule": {
            "min_value": options.kept, "max_value": options.length,
            "schedule_config": {"require_steps": 10**9, "seq_per_step": 1}}})  # fmt: skip
    convert_to_random_ltd(ltd, Block, config=TokenDrop(schedule))
    drop = convert_to_layer_drop(dropping, Block, schedule=ProgressiveLayerDrop(0.5, 1.0), rescale=True)
    drop.update_state(100)
    while sum(drop.keeps(i) for i in range(options.layers)) != round(options.layers * 0.75):
        drop.update_state(drop.step + 1)  # a step with the mean number of layers
    step(dropping, batch)  # learns how the layers' results look
    models = (empty, plain, ltd, dropping)
    outside, whole, tokens_dropped, layers_dropped = medians(
        [lambda model=model: step(model, batch) for model in models], options.repeats
    )
    one = operations(options.length, options.width)
    share = len(middle) / options.layers * (1 - operations(options.kept, options.width) / one)
    table = Table({"technique": "", "plain ms": "{:.1f}", "with it ms": "{:.1f}", "saving in the layers": "{:.1f} %",
                   "in theory": "{:.1f} %", "realised / theoretical": "{:.3f}"})  # fmt: skip
    report(table, "random-LTD", (whole, tokens_dropped, outside), share, 0.95)
    kept = sum(drop.keeps(i) for i in range(options.layers))
    report(table, "layer dropping", (whole, layers_dropped, outside), 1 - kept / options.layers, 0.98)
    hidden = torch.randn(options.batch, options.length, options.width, requires_grad=True)

    def gather_and_scatter() -> float:
        begin = time.perf_counter()
        indices = draw_indices(options.batch, options.length, options.kept, hidden.device)
        scatter_tokens(hidden, gather_tokens(hidden, indices, True), indices, True).sum().backward()
        return time.perf_counter() - begin

    spent = medians([gather_and_scatter], options.repeats)[0] * len(middle)
    text = f"gather and scatter of {len(middle)} layers at most 2 % of a plain step"
    table.goal(text, f"{spent * 1e3:.2f} ms, {spent / whole:.1%}", met=spent / whole <= 0.02)
    table.save(options.json)


if __name__ == "__main__":
    main()
