"""The peak of memory that a plan says, beside what PyTorch's own allocator reports of real ranks."""

import gc
import json
import statistics

import pytest
import torch
from dsx_testkit import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 128, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Small(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def case(stage, micro=8, accumulation=1, *, again=False, **zero):
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
    }
    return config, again


HOST = {"device": "cpu"}
ALONE = {
    "stage 0": case(0),
    "recomputed": case(0, again=True),
    "large batch": case(0, 24),
    "large batch, recomputed": case(0, 24, again=True),
    "accumulation": case(0, 8, 4),
    "stage 3": case(3),
    "stage 3, recomputed": case(3, 24, 2, again=True),
    "stage 2, offload": case(2, offload_optimizer=HOST),
    "stage 3, offload": case(3, 16, offload_optimizer=HOST, offload_param=HOST),
}
TOGETHER = {
    "stage 0": case(0),
    "stage 1": case(1, 8, 3),
    "stage 2": case(2, 16),
    "stage 2, recomputed": case(2, 24, again=True),
    "stage 3": case(3, 16),
    "stage 3, recomputed": case(3, 24, 2, again=True),
    "stage 3, offload": case(3, 8, offload_optimizer=HOST),
}


def measured(rank, world, make, cases, folder):
    """The most that PyTorch's allocator has given out at one time in the fourth step, by case."""
    import dsx
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    found = {}
    for name, (config, again) in cases.items():
        config = json.loads(json.dumps(config))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            tokens = torch.zeros(config["train_micro_batch_size_per_gpu"], LENGTH, dtype=torch.int64)
            engine, *_ = dsx.initialize(model=make(again), config=config)
            for step in range(4):
                with record_function(f"step {step}"):
                    for _ in range(config["gradient_accumulation_steps"]):
                        engine.backward(engine(tokens))
                        engine.step()
        path = f"{folder}/{rank}.json"
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        begin = next(e["ts"] for e in events if e.get("name") == "step 3" and e.get("cat") == "user_annotation")
        memory = [(float(e["ts"]), e["args"]) for e in events if e.get("name") == "[memory]"]
        memory.sort(key=lambda item: item[0])
        before = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]  # what earlier profiles have not seen to go
        found[name] = max(args["Total Allocated"] for at, args in memory if at >= float(begin)) - before
        engine.destroy()
        del engine, tokens, profiler
        gc.collect()
    return found


def compared(world, cases, folder, **options):
    from dsx.planning import Machine, plan

    real = run_ranks(measured, world, Small, cases, str(folder), timeout=300, **options)[0]
    here, shares = Machine.of_this_host(), {}
    for name, (config, again) in cases.items():
        tokens = torch.zeros(config["train_micro_batch_size_per_gpu"], LENGTH, dtype=torch.int64)
        found = plan(lambda again=again: Small(again), config, world_size=world, machine=here, batch=tokens)
        shares[name] = sum(found.peak.values()) / real[name]
    return shares


def check(shares):
    errors = [abs(share - 1.0) for share in shares.values()]
    assert statistics.median(errors) <= 0.005 and max(errors) <= 0.02, shares


def test_one_rank(tmp_path):
    check(compared(1, ALONE, tmp_path))


def test_two_ranks(tmp_path):
    some = {name: TOGETHER[name] for name in ("stage 1", "stage 3, recomputed")}
    check(compared(2, some, tmp_path, backend="gloo"))


@pytest.mark.slow
def test_two_ranks_all(tmp_path):
    check(compared(2, TOGETHER, tmp_path, backend="gloo"))
