"""QK-clip in pipelines: every stage clips the attention that it has, by the largest logits of all micro-batches and
data-parallel ranks; a stage may have none. The oracle is plain Muon in one process, with the logits written out.
"""

import math

import dsx
import pytest
import torch
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")
dsx_ops = pytest.importorskip("dsx_ops")

MICRO_BATCHES, UPDATES, THRESHOLD = 4, 3, 2.0


class Attention(nn.Module):
    def __init__(self, watched=True):
        super().__init__()
        self.num_heads, self.watched, self.scores = 2, watched, None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        with torch.no_grad():
            self.q_proj.weight.mul_(4.0)
            self.k_proj.weight.mul_(4.0)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.watched:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.mT / 2.0).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
            self.scores, out = scores.detach().amax((0, 2, 3)), scores.softmax(-1) @ v
        return x + out.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


def layers(watched=True, attention=True):
    torch.manual_seed(0)
    middle = [Attention(watched), Block(), Block(), Attention(watched)] if attention else [Block() for _ in range(4)]
    return [nn.Embedding(11, 8), *middle, nn.Linear(8, 11, bias=False)]


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(count):
    draw = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, 11, (2, 5), generator=draw) for _ in range(count)]
    return [(t, t.roll(1, 1)) for t in tokens]


def by_the_rule(replicas):
    """Weights by the number of the layer and the name there; and how many heads were clipped."""
    model = nn.ModuleList(layers(watched=False))
    groups = [{"params": [model[0].weight], "use_muon": False}, {"params": list(model[1:].parameters())}]
    optimizer, clipped = dsx_ops.Muon(groups, lr=0.02), 0
    per_update = MICRO_BATCHES * replicas
    batches = micro_batches(per_update * UPDATES)
    for update in range(UPDATES):
        largest = {place: torch.full((2,), -math.inf) for place in (1, 4)}
        for x, labels in batches[update * per_update : (update + 1) * per_update]:
            for layer in model:
                x = layer(x)
            (loss_of(x, labels) / per_update).backward()
            largest = {place: torch.maximum(before, model[place].scores) for place, before in largest.items()}
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        for place, found in largest.items():
            for head, logit in enumerate(found):
                if logit > THRESHOLD:
                    clipped += 1
                    for projection in (model[place].q_proj, model[place].k_proj):
                        projection.weight.data[4 * head : 4 * head + 4] *= math.sqrt(THRESHOLD / logit)
    return {
        f"{place}.{n}": p.detach() for place, layer in enumerate(model) for n, p in layer.named_parameters()
    }, clipped


def engine_of(stages, stage, made, schedule="1f1b", **clip):
    module = dsx_pipe.PipelineModule(
        made, num_stages=stages, loss_fn=loss_of, schedule=schedule, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.3,
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 0.02, "weight_decay": 0.0, "qk_clip": {"threshold": THRESHOLD, **clip}},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return dsx.initialize(model=module, config=config)[0]


def train(rank, world, stages, stage, schedule):
    made = layers()
    numbers = {id(layer): place for place, layer in enumerate(made)}
    engine = engine_of(stages, stage, made, schedule)
    data = engine.module.grid.data
    per_update = MICRO_BATCHES * data.size
    batches = micro_batches(per_update * UPDATES)
    for update in range(UPDATES):
        engine.train_batch(iter(batches[update * per_update : (update + 1) * per_update][data.rank :: data.size]))
    clip = engine.optimizer.qk_clip
    engine.eval_batch(iter(batches[:MICRO_BATCHES]))
    assert not clip.largest()  # an evaluation is not observed
    found = {}
    for layer in engine.module.modules():
        if (place := numbers.get(id(layer))) is not None:
            for name, p in layer.named_parameters():
                whole = p.full_tensor() if hasattr(p, "full_tensor") else p
                found[f"{place}.{name}"] = whole.detach().clone()
    return found, len(clip.layers)


@pytest.mark.parametrize(
    ("world", "stages", "stage", "schedule"),
    [(2, 2, 0, "1f1b"), (3, 3, 2, "1f1b"), (2, 2, 1, "zb-h1"), (4, 2, 3, "1f1b")],
)
def test_each_stage_clips_its_attention_by_the_rule(world, stages, stage, schedule):
    wanted, clipped = by_the_rule(world // stages)
    assert clipped >= 4
    by_rank = run_ranks(train, world, stages, stage, schedule, timeout=120)
    assert {count for _, count in by_rank} == ({1} if stages == 2 else {0, 1})
    seen = set()
    for found, _ in by_rank:
        seen |= found.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == wanted.keys()


def refused(rank, world, what):
    if what == "no attention":
        engine_of(2, 1, layers(attention=False))
    elif what == "names":
        engine_of(2, 1, layers(), layers=["nothing.of.this"])
    elif what == "one stage":  # the heads of one stage only do not divide the rows
        made = layers()
        made[4].num_heads = 3
        engine_of(2, 1, made)
    else:  # the attention of one stage is by a kernel that nobody sees
        made = layers()
        made[4].watched = False
        engine = engine_of(2, 1, made)
        engine.train_batch(iter(micro_batches(MICRO_BATCHES)))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no attention", "found no attention"),
        ("names", "no stage has a module nothing.of.this"),
        ("one stage", "expected 3 heads"),
        ("unseen", "no logits were observed"),
    ],
)
def test_what_one_stage_refuses_all_stages_are_told(what, words):
    with pytest.raises(RankError, match=words) as caught:
        run_ranks(refused, 2, what, timeout=60)
    assert len(caught.value.failures) == 2
    assert all(words in failure.traceback for failure in caught.value.failures)
