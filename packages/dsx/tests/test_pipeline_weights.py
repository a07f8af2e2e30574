"""Whole weights of a pipeline: `module_state_dict` and `save_16bit_model` give those of all stages."""

from __future__ import annotations

import copy

import dsx
import pytest
import torch
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

GATHER = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


class Scaled(nn.Module):
    """With a buffer, a frozen parameter and one without elements."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.full((), 0.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.linear(x) * self.factor


def layers():
    torch.manual_seed(0)
    embedding, middle = Embedding(), [Scaled() for _ in range(4)]
    tied = dsx_pipe.TiedLayerSpec("embedding", lambda: copy.deepcopy(embedding))
    head = dsx_pipe.TiedLayerSpec("embedding", lambda: copy.deepcopy(embedding), forward_fn=logits)
    return embedding, middle, [tied, *middle, head]


def logits(embedding, x):
    return x @ embedding.weight.T


def expected():
    embedding, middle, _ = layers()
    found = {"tied_modules.embedding.weight": embedding.weight.detach()}
    for index, layer in enumerate(middle, 1):
        found |= {f"{index}.{name}": value for name, value in layer.state_dict().items()}
    return found


def saved(rank, world, stages, stage, schedule, folder):
    module = dsx_pipe.PipelineModule(layers()[2], num_stages=stages, schedule=schedule, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **GATHER}}
    engine = dsx.initialize(model=module, config={**config, "optimizer": {"type": "AdamW"}})[0]
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(folder, "model.safetensors", exclude_frozen_parameters=True)
    only_first = engine.module_state_dict(rank0_only=True)
    assert (only_first is None) == (rank > 0)
    return engine.module_state_dict()


@pytest.mark.parametrize(
    ("world", "stages", "stage", "schedule"),
    [(2, 2, 1, "1f1b"), (2, 2, 3, "zbv"), pytest.param(4, 2, 2, "1f1b", marks=pytest.mark.slow)],
)
def test_whole_weights_are_those_of_all_stages_on_every_rank(world, stages, stage, schedule, tmp_path):
    from safetensors.torch import load_file

    want = expected()
    states = run_ranks(saved, world, stages, stage, schedule, str(tmp_path))
    states.append(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    for state in states:
        assert set(state) == set(want)
        for name, value in want.items():
            assert torch.equal(state[name], value), name
    safe = load_file(tmp_path / "model.safetensors")
    assert set(safe) == {name for name in want if "frozen" not in name}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]


def experts_on_one_stage(rank, world, folder):
    from dsx_moe import MoE

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE(4, lambda i: nn.Linear(4, 4), 2, ep_size=2)

        def forward(self, x):
            return self.moe(x)[0]

    module = dsx_pipe.PipelineModule(
        [dsx_pipe.LayerSpec(nn.Linear, 4, 4), dsx_pipe.LayerSpec(Layer)], num_stages=2, partition_method="uniform"
    )
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    dsx.initialize(model=module, config=config)[0].save_16bit_model(folder)


def test_tensors_of_which_one_stage_has_a_part_only_are_refused_on_all_ranks(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(experts_on_one_stage, 4, str(tmp_path))
    assert str(caught.value).count("save_checkpoint writes them all") >= 4
    assert not list(tmp_path.iterdir())


class Positions(nn.Module):
    """Words, which the head uses too, and positions, which only the first stage uses; `plain` is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.word, self.position = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.plain = nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.word(tokens) + self.position(torch.arange(tokens.shape[1]))


def words(embedding, x):
    return x @ embedding.word.weight.T


def token_loss(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def token_batches(count, update):
    draw = torch.Generator().manual_seed(update)
    return [(t, t.roll(1, 1)) for t in (torch.randint(0, 7, (2, 5), generator=draw) for _ in range(count))]


def tied(rank, world, stage, schedule, names, count, folder):
    torch.manual_seed(0)
    middle = [nn.Linear(4, 4) for _ in range(4)]
    spec = dsx_pipe.TiedLayerSpec("embed", Positions, tied_weight_attr=names)
    head_spec = dsx_pipe.TiedLayerSpec("embed", Positions, forward_fn=words, tied_weight_attr=names)
    module = dsx_pipe.PipelineModule(
        [spec, *middle, head_spec], num_stages=world, loss_fn=token_loss, schedule=schedule, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": count, "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine = dsx.initialize(model=module, config=config)[0]
    found = []
    for update in range(3):
        loss = float(engine.train_batch(iter(token_batches(count, update))))
        found.append((loss, engine.last_step.grad_norm))
    engine.save_checkpoint(folder, tag="a")
    engine.load_checkpoint(folder, tag="a")
    return found


def tied_on_one_process(count):
    torch.manual_seed(0)
    middle, found = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), []
    embedding = Positions()
    parameters = [*embedding.word.parameters(), *embedding.position.parameters(), *middle.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)
    for update in range(3):
        total = 0.0
        for tokens, labels in token_batches(count, update):
            loss = token_loss(words(embedding, middle(embedding(tokens))), labels) / count
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(parameters, 0.3))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


@pytest.mark.parametrize(
    ("stage", "schedule", "names", "count"),
    [
        (0, "1f1b", "word.weight", 2),
        (1, "1f1b", ["word.weight", "position.weight"], 2),
        (1, "zb-h1", "word.weight", 1),
        (2, "1f1b", "word.weight", 2),
        (3, "1f1b", ["word.weight", "position.weight"], 2),
    ],
)
def test_a_tied_embedding_with_weights_that_one_stage_uses_trains_and_is_saved(stage, schedule, names, count, tmp_path):
    want = tied_on_one_process(count)
    for found in run_ranks(tied, 2, stage, schedule, names, count, str(tmp_path)):
        assert found == [pytest.approx(pair, rel=1e-4) for pair in want]
