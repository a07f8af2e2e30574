"""Every schedule with stages that sleep: measured step / theoretical step, bubbles, activations in memory.

    torchrun --nproc-per-node 8 packages/dsx-pipe/bench/schedules.py [--json FILE]
    torchrun --nproc-per-node 8 packages/dsx-pipe/bench/schedules.py --micro-batches 16 --milliseconds 20 --steps 3

The theoretical step is simulated with the requested times and no communication. Goals: measured / theoretical is at
most 1.02 for every schedule; the bubble of a zero-bubble schedule is at most 0.36 of 1F1B's, with at most as many
activations.
"""

import argparse

import dsx_comm
import dsx_pipe
import torch
from dsx_testkit.results import Table, add_json_option
from sleepers import Sleeper


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="length of the shortest pass")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--charts", help="folder for charts of the measured steps")
    add_json_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dsx_comm.init_distributed()
    rank, world, m = dsx_comm.get_rank(), dsx_comm.get_world_size(), arguments.micro_batches
    unit = arguments.milliseconds / 1e3
    names = [n for n in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv") if n != "interleaved" or m % world == 0]
    base_bubble, base_kept = 0.0, 1.0
    if rank == 0:
        one = arguments.milliseconds
        print(f"{world} ranks, {m} micro-batches; a pass takes {one} ms, or {2 * one} ms with one stage per rank")
    table = Table({"schedule": "", "theory s": "{:.3f}", "measured s": "{:.3f}", "ratio": "{:.3f}",
                   "bubble / 1F1B's": "{:.3f}", "activations / 1F1B's": "{:.2f}"})  # fmt: skip
    for name in names:
        plan = dsx_pipe.build(name, world, m)
        chunks = plan.stages // world
        seconds = 2 * unit / chunks  # a rank sleeps equally long in every schedule: one stage of 2 units, or two of one
        times = dsx_pipe.schedule.StageTimes(seconds, seconds, seconds)
        stages = [Sleeper(seconds, seconds, seconds) for _ in plan.stages_of(rank)]
        pipe = dsx_pipe.Pipeline(stages, plan, loss_fn=lambda out, labels: out.sum())
        data = torch.zeros(m, 4)
        lengths = []
        for _ in range(arguments.steps + 1):
            pipe.step(data, data)
            report = pipe.report()
            lengths.append(report.measured.length)
        measured, theory = min(lengths[1:]), dsx_pipe.simulate(plan, (times,) * plan.stages).length
        bubble = measured - m * 3 * seconds * chunks
        kept = max(dsx_pipe.live_activations(plan)) / chunks
        if name == "1f1b":
            base_bubble, base_kept = bubble, kept
        if rank == 0:
            over = (bubble / base_bubble, kept / base_kept) if base_bubble else ()
            table.add(name, theory, measured, measured / theory, *over)
            table.goal(f"{name} within 1.02 of theory", f"{measured / theory:.3f}", met=measured / theory <= 1.02)
            if name.startswith("zb"):
                least = bubble / base_bubble
                table.goal(f"{name}: a bubble of at most 0.36 of 1F1B's", f"{least:.3f}", met=least <= 0.36)
            if arguments.charts:
                dsx_pipe.schedule.save_chart(report.measured, f"{arguments.charts}/{name}.svg")
    if rank == 0:
        table.save(arguments.json)
    dsx_comm.destroy_process_group()


if __name__ == "__main__":
    main()
