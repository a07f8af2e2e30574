"""The profiler in a pipeline: stages on ranks of their own add up to what the whole model does in one process."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from dsx_monitor import FlopsProfiler  # noqa: E402
from dsx_monitor.flops import RunFacts  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

WIDTH, HEADS, LENGTH, WORDS, MICRO_BATCHES, SAMPLES = 16, 2, 6, 50, 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


def stages():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Embedding(WORDS, WIDTH), Attention()),
        nn.Sequential(Recomputed(), Attention()),
        nn.Sequential(Recomputed(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)),
    ]


def batches(replica):
    generator = torch.Generator().manual_seed(replica)
    return [torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def figures(profiler):
    root, totals = profiler.root, profiler.totals
    return {
        "flops": root.flops,
        "macs": root.macs,
        "backward": totals.backward_flops,
        "of modules": root.backward_flops,
        "recomputed": totals.recompute_flops,
        "outside": totals.outside_flops,
        "params": root.params,
    }


def whole_model(replicas):
    """All micro-batches of all replicas through the model in this process."""
    profiler = FlopsProfiler(nn.Sequential(*stages()))
    found = []
    for replica in range(replicas):
        profiler.start_profile()
        for batch in batches(replica):
            loss_of(profiler.model(batch[:, :-1]), batch).backward()
        profiler.stop_profile()
        profiler.model.zero_grad()
        found.append(figures(profiler))
    return {name: sum(f[name] for f in found) for name in found[0]}, found[0]["params"]


def steps(place, count, interleaved):
    """What a stage does: "f" and "b", all forwards first or one forward one backward."""
    ahead = min(count - 1 - place, MICRO_BATCHES) if interleaved else MICRO_BATCHES
    return "f" * ahead + "fb" * (MICRO_BATCHES - ahead) + "b" * ahead


def run_stage(rank, world, depth, interleaved):
    import torch.distributed as dist

    replica, place = divmod(rank, depth)
    stage = stages()[place]
    first, last = place == 0, place == depth - 1
    work, sent, todo = batches(replica), [], []
    profiler = FlopsProfiler(stage)
    profiler.facts = RunFacts(world_size=world, data_parallel=world // depth)
    profiler.start_profile()
    coming = iter(work)
    for step in steps(place, depth, interleaved):
        if step == "f":
            batch = next(coming)
            x = batch[:, :-1]
            if not first:
                x = torch.empty(SAMPLES, LENGTH, WIDTH)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            out = stage(x)
            todo.append((x, loss_of(out, batch) if last else out))
            if not last:
                kept = out.detach().contiguous()
                sent.append((dist.isend(kept, rank + 1), kept))
            continue
        x, out = todo.pop(0)
        gradient = None
        if not last:
            gradient = torch.empty(SAMPLES, LENGTH, WIDTH)
            dist.recv(gradient, rank + 1)
        torch.autograd.backward(out, gradient)
        if not first:
            sent.append((dist.isend(x.grad, rank - 1), x.grad))
    for work_handle, _ in sent:
        work_handle.wait()
    profiler.stop_profile()

    def gather(own):
        rows = [None] * world
        dist.all_gather_object(rows, own)
        return rows

    totals = profiler.gather_ranks(gather)
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in stage.modules())
    return figures(profiler), totals, profiler.text(), profiler.as_dict(), left, profiler.get_unknown_operators()


@pytest.mark.parametrize("interleaved", [False, True], ids=["all forwards first", "1F1B"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_stages_of_a_pipeline_add_up_to_the_whole_model(interleaved, replicas):
    testkit = pytest.importorskip("dsx_testkit")
    expected, params = whole_model(replicas)
    found = testkit.run_ranks(run_stage, 3 * replicas, 3, interleaved)
    own = [rank[0] for rank in found]
    for name in ("flops", "macs", "of modules", "recomputed"):
        assert sum(figure[name] for figure in own) == expected[name] > 0, name
    assert all(figure["flops"] > 0 and figure["backward"] > 0 for figure in own)
    for _, totals, text, content, left, unknown in found:
        assert (totals.flops, totals.macs) == (expected["flops"], expected["macs"])
        assert (totals.backward_flops, totals.recompute_flops) == (expected["backward"], expected["recomputed"])
        assert totals.params == params and [r.flops for r in totals.ranks] == [f["flops"] for f in own]
        assert f"fwd flops of {3 * replicas} ranks" in text and "* mp_size" not in text
        assert len(content["facts"]["over_ranks"]["ranks"]) == 3 * replicas
        assert left == 0 and not unknown
