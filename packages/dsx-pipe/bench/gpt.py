"""Time of a step of an 8-layer GPT (19 M parameters): one process, dsx-pipe, torch's pipelining, DeepSpeed.

    python packages/dsx-pipe/bench/gpt.py [--json FILE]                     # all of them, on 2 processes
    python packages/dsx-pipe/bench/gpt.py --peers "one dsx-1f1b torch-1f1b" --steps 5
    python packages/dsx-pipe/bench/gpt.py --deepspeed-path FOLDER           # where `import deepspeed` is found

Each peer runs in new processes with one thread each. For dsx-pipe the ideal is printed too: the simulated length of the
schedule with the stage times of the same step. Goals on a quiet machine: 1F1B and ZB-H1 take at most 1.03 of their
ideals and are at least as fast as torch's same schedule; 1F1B is at least 1.2 times as fast as DeepSpeed.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from dsx_testkit import benches
from dsx_testkit.benches import Block
from dsx_testkit.results import Table, add_json_option
from torch import nn

WIDTH, HEADS, LAYERS, VOCAB, SEQUENCE, MICRO = 448, 7, 8, 256, 256, 8
PEERS = ("one", "dsx-1f1b", "dsx-zb-h1", "dsx-zbv", "torch-1f1b", "torch-zbv", "deepspeed")


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


def head():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))


def layers():
    torch.manual_seed(0)
    return [Embed(), *(Block(WIDTH, HEADS) for _ in range(LAYERS)), head()]


def loss_fn(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(size):
    ids = torch.randint(0, VOCAB, (MICRO * size, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:].contiguous()


def stages_of(bounds):
    built = layers()
    return [nn.Sequential(*built[a:b]) for a, b in itertools.pairwise(bounds)]


# Each of the following functions returns (a function that runs one step, the parameters on this rank, a function that
# returns what the peer reports about its last step).


def one_process(arguments):
    model = nn.Sequential(*layers())
    x, y = batch(arguments.rows)

    def step():
        for a, b in zip(x.chunk(MICRO), y.chunk(MICRO)):
            (loss_fn(model(a), b) / MICRO).backward()

    return step, model.parameters(), dict


def dsx_pipeline(arguments, name):
    import dsx_comm
    import dsx_pipe

    dsx_comm.init_distributed()
    plan = dsx_pipe.build(name, dsx_comm.get_world_size(), MICRO)
    stages = stages_of(dsx_pipe.partition_uniform(LAYERS + 2, plan.stages))
    mine = [stages[s] for s in plan.stages_of(dsx_comm.get_rank())]
    pipe = dsx_pipe.Pipeline(mine, plan, loss_fn=loss_fn)
    x, y = batch(arguments.rows)

    def step():
        pipe.step(x, y)

    def read_report():
        report = pipe.report()
        return {"ideal": 1e3 * report.ideal.length, "ratio": report.over_ideal}

    return step, [p for s in mine for p in s.parameters()], read_report


def torch_pipelining(arguments, name):
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    count = 2 * world if name == "zbv" else world
    bounds = [round(i * (LAYERS + 2) / count) for i in range(count + 1)]
    modules, device = stages_of(bounds), torch.device("cpu")
    mine = (rank, 2 * world - 1 - rank) if name == "zbv" else (rank,)
    stages = [PipelineStage(modules[s], s, count, device) for s in mine]
    if name == "zbv":
        schedule = ScheduleZBVZeroBubble(stages, MICRO, loss_fn=loss_fn)
    else:
        schedule = Schedule1F1B(stages[0], MICRO, loss_fn=loss_fn)
    x, y = batch(arguments.rows)

    def step():
        inputs = (x,) if rank == 0 else ()
        last = count - 1 in mine
        schedule.step(*inputs, **({"target": y} if last else {}))
        dist.barrier()

    return step, [p for s in mine for p in modules[s].parameters()], dict


def deepspeed_pipeline(arguments):
    os.environ.setdefault("LOCAL_SIZE", "2")
    if arguments.deepspeed_path:
        sys.path.insert(0, arguments.deepspeed_path)
    deepspeed = benches.deepspeed()
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    module = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_batch_size": MICRO * arguments.rows,
        "train_micro_batch_size_per_gpu": arguments.rows,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    x, y = batch(arguments.rows)

    def step():
        engine.train_batch(iter(list(zip(x.chunk(MICRO), y.chunk(MICRO)))))

    return step, [], dict


def worker(arguments):
    torch.set_num_threads(1)
    name = arguments.worker
    if name == "one":
        step, parameters, read_report = one_process(arguments)
    elif name.startswith("dsx-"):
        step, parameters, read_report = dsx_pipeline(arguments, name.removeprefix("dsx-"))
    elif name.startswith("torch-"):
        step, parameters, read_report = torch_pipelining(arguments, name.removeprefix("torch-"))
    else:
        step, parameters, read_report = deepspeed_pipeline(arguments)
    parameters = list(parameters)
    times, reported = [], {}
    for _ in range(arguments.steps + 1):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        reported = read_report()
        for p in parameters:
            p.grad = None
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.flush()
        found = {"ms": 1e3 * statistics.median(times[1:]), "least": 1e3 * min(times[1:]), **reported}
        print(f"RESULT {json.dumps(found)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default=" ".join(PEERS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--deepspeed-path")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments)
    print(f"{sum(p.numel() for x in layers() for p in x.parameters()) / 1e6:.1f} M parameters, {MICRO} micro-batches")
    table = Table({"system": "", "ms per step": "{:.0f}", "least": "{:.0f}", "ideal of the last step, ms": "{:.0f}",
                   "measured / ideal": "{:.3f}"})  # fmt: skip
    by_peer = {}
    for peer in arguments.peers.split():
        command = [sys.executable]
        if peer != "one":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [__file__, "--worker", peer, "--steps", str(arguments.steps), "--rows", str(arguments.rows)]
        if arguments.deepspeed_path:
            command += ["--deepspeed-path", arguments.deepspeed_path]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not found:
            print(f"{peer} failed: {done.stderr.strip()[-500:]}", flush=True)
            continue
        by_peer[peer] = row = json.loads(found[0])
        table.add(peer, row["ms"], row["least"], row.get("ideal"), row.get("ratio"))
    for name in ("dsx-1f1b", "dsx-zb-h1"):
        if name in by_peer:
            ratio = by_peer[name]["ratio"]
            table.goal(f"{name} within 1.03 of its ideal", f"{ratio:.3f}", met=ratio <= 1.03)
    for ours, peer, least in (("1f1b", "torch-1f1b", 1.0), ("zbv", "torch-zbv", 1.0), ("1f1b", "deepspeed", 1.2)):
        if {f"dsx-{ours}", peer} <= by_peer.keys():
            ratio = by_peer[peer]["ms"] / by_peer[f"dsx-{ours}"]["ms"]
            table.goal(f"dsx-{ours} at least {least}x {peer}", f"{ratio:.2f}x", met=ratio >= least)
    table.save(arguments.json)


if __name__ == "__main__":
    main()
