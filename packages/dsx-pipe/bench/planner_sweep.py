"""The planner's choice against a sweep of measured steps. Layers sleep in place of computing.

    torchrun --nproc-per-node 4 packages/dsx-pipe/bench/planner_sweep.py [--json FILE]

The planner gets layer costs that `measure_layers` has measured (four timed passes over the layers). The sweep has at
least 40 points: schedules, numbers of micro-batches and splits of the layers. Goal: the step of the planner's choice
takes at most 1.03 of the best step of the sweep.
"""

import argparse
import itertools

import dsx_comm
import dsx_pipe
import torch
from dsx_testkit.results import Table, add_json_option
from sleepers import Sleeper
from torch import nn


class PerSample(Sleeper):
    """Sleeps in proportion to the batch, plus a fixed cost."""

    def __init__(self, per_sample, fixed):
        super().__init__(0.0, 0.0, 0.0)
        self.per_sample, self.fixed = per_sample, fixed

    def forward(self, x):
        seconds = self.per_sample * x.shape[0] + self.fixed
        self.seconds = (seconds, seconds, seconds)
        return super().forward(x)


def shortest_step(plan, parts, layers, rank, batch, steps):
    stages = [nn.Sequential(*layers[parts[s] : parts[s + 1]]) for s in plan.stages_of(rank)]
    pipe = dsx_pipe.Pipeline(stages, plan, loss_fn=lambda out, labels: out.sum())
    data = torch.zeros(batch, 4)
    return min(timed_step(pipe, data) for _ in range(steps))


def timed_step(pipe, data):
    pipe.step(data, data)
    return pipe.report().measured.length


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--milliseconds", type=float, default=4.0, help="time of the lightest layer per sample")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--points", type=int, default=10**6, help="measure at most this many points")
    add_json_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dsx_comm.init_distributed()
    rank, world, unit = dsx_comm.get_rank(), dsx_comm.get_world_size(), arguments.milliseconds / 1e3
    layers = [PerSample(unit * (1 + i % 3), unit / 2) for i in range(2 * world)]
    costs = [None]
    if rank == 0:
        costs = [dsx_pipe.measure_layers(layers, torch.zeros(4, 4), repeats=1)]
    dsx_comm.broadcast_object_list(costs, src=0)
    choice = dsx_pipe.plan(costs[0], world, arguments.batch)
    counts = [m for m in (2, 3, 4, 6, 12) if arguments.batch % m == 0]
    splits = [
        (0, *cut, len(layers)) for cut in itertools.combinations(range(1, len(layers)), world - 1)
        if max(b - a for a, b in itertools.pairwise((0, *cut, len(layers)))) <= 3
    ]  # fmt: skip
    splits = splits[:: max(1, len(splits) // 5)]
    points = [(name, m, parts) for name in ("gpipe", "1f1b", "zb-h1") for m in counts for parts in splits][
        : arguments.points
    ]
    sweep = []
    for name, m, parts in points:
        length = shortest_step(dsx_pipe.build(name, world, m), parts, layers, rank, arguments.batch, arguments.steps)
        sweep.append((length, name, m, parts))
    chosen = shortest_step(choice.build(world), choice.parts, layers, rank, arguments.batch, arguments.steps)
    if rank == 0:
        best = min(sweep)
        table = Table({"choice": "", "schedule": "", "micro-batches": "", "split": "", "predicted s": "{:.3f}",
                       "measured s": "{:.3f}"})  # fmt: skip
        table.add(f"best of {len(sweep)} points", best[1], best[2], str(best[3]), None, best[0])
        split = str(tuple(choice.parts))
        table.add("the planner's", choice.schedule, choice.micro_batches, split, choice.seconds, chosen)
        table.goal("at most 1.03 of the best", f"{chosen / best[0]:.3f}", met=chosen / best[0] <= 1.03)
        table.save(arguments.json)
    dsx_comm.destroy_process_group()


if __name__ == "__main__":
    main()
