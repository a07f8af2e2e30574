"""`PipelineModule` divides layers, builds them on the ranks that use them, ties and recomputes them.

Hugging Face models work unchanged.
"""

import dsx_comm
import pytest
import torch
from dsx_comm.errors import TopologyError
from dsx_pipe import (
    LayerSpec,
    Pipeline,
    PipelineError,
    PipelineModule,
    PipeModelDataParallelTopology,
    StageError,
    TiedLayerSpec,
    partition_balanced,
    partition_uniform,
)
from dsx_pipe.errors import PartitionError
from dsx_pipe.partition import split_by_weights
from dsx_testkit import run_ranks
from torch import nn

VOCAB, WIDTH = 11, 6


def test_golden_partitions():
    assert partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert partition_balanced([1, 1, 1, 1, 5, 1, 1, 1], 4) == [0, 2, 4, 5, 8]
    assert partition_balanced([0, 1, 1, 1, 0, 0], 2) == [0, 3, 6]
    assert split_by_weights([9, 1, 1, 1, 1, 1, 1], 2) == [0, 1, 7]
    with pytest.raises(PartitionError, match="2 layers for 3 stages"):
        split_by_weights([1, 1], 3)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def project(module, x):
    return nn.functional.linear(x, module.weight)


def specs(blocks=4):
    return [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH),
        [LayerSpec(Block, WIDTH) for _ in range(blocks)],
        lambda x: 2 * x,
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=project),
    ]


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def one_process(blocks, base_seed):
    """The same layers, built under the seeds of their indices."""
    built = []
    for index in range(blocks + 1):
        torch.manual_seed(base_seed + index)
        built.append(nn.Embedding(VOCAB, WIDTH) if index == 0 else Block(WIDTH))
    return built


def tied(rank, world, schedule, interval):
    pm = PipelineModule(
        specs(), num_stages=world, loss_fn=cross_entropy, seed_layers=True, base_seed=5, partition_method="uniform",
        schedule=schedule, activation_checkpoint_interval=interval,
    )  # fmt: skip
    assert pm.activation_checkpoint_interval == interval
    pipe = Pipeline(pm, schedule, micro_batches=4)
    ids = torch.randint(0, VOCAB, (8, 5), generator=torch.Generator().manual_seed(0))
    loss = pipe.step(ids, ids)
    layers = one_process(4, 5)
    total = 0.0
    for part in ids.chunk(4):
        x = layers[0](part)
        for block in layers[1:]:
            x = block(x)
        one = cross_entropy(project(layers[0], 2 * x), part) / 4
        one.backward()
        total += one.item()
    assert float(loss) == pytest.approx(total, rel=1e-5)
    expected = {f"{i}.{n}": p.grad for i, b in enumerate(layers) if i for n, p in b.named_parameters()}
    expected["tied_modules.embed.weight"] = layers[0].weight.grad
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    return sorted(n for n, _ in pm.named_parameters()), list(pm.parts), [t.ranks for t in pm.ties.ties]


@pytest.mark.parametrize("schedule, interval", [("1f1b", 0), ("zb-h1", 2), ("zbv", 0), ("interleaved", 1)])
def test_tied_weights_and_recomputation_give_the_gradients_of_one_process(schedule, interval):
    (first, parts, ties), (second, _, _) = run_ranks(tied, 2, schedule, interval, backend="dsx")
    assert parts == ([0, 4, 7] if schedule in ("1f1b", "zb-h1") else [0, 2, 4, 6, 7])
    both = "tied_modules.embed.weight"
    if schedule == "zbv":  # first and last stage are on rank 0: one weight, nothing to reduce
        assert both in first and both not in second and ties == []
    else:
        assert both in first and both in second and ties == [(0, 1)]


def sequential(rank, world):
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(shared, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared)
    pm = PipelineModule(model, num_stages=world, loss_fn=nn.functional.mse_loss, partition_method="type:linear")
    x = torch.randn(4, WIDTH)
    loss = Pipeline(pm, "1f1b", micro_batches=2).step(x, x)
    grads = {n: p.grad.clone() for n, p in pm.named_parameters()}
    model.zero_grad()
    expected = nn.functional.mse_loss(model(x), x)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    reference = {**dict(model.named_parameters()), "4.weight": shared.weight, "4.bias": shared.bias}
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, reference[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    return pm.stage_owner(0), pm.stage_owner(4), len(pm.get_tied_weights_and_groups())


def test_an_ordinary_sequential_is_split_and_its_shared_layers_are_tied():
    assert run_ranks(sequential, 2, backend="dsx") == [(0, 1, 2)] * 2


def refused(rank, world):
    with pytest.raises(TopologyError, match="num_stages=4: the world has 2 ranks"):
        PipelineModule([nn.Linear(2, 2)] * 4, num_stages=4)
    with pytest.raises(PartitionError, match=r"got 1 layers for 2 stages.*num_stages=1"):
        PipelineModule([nn.Linear(2, 2)], num_stages=2)
    with pytest.raises(TopologyError, match="8 ranks, the world has 2"):
        PipelineModule([nn.Linear(2, 2)] * 2, topology=PipeModelDataParallelTopology(2, 2, 2))
    with pytest.raises(PipelineError, match="expected exactly one"):
        PipelineModule([nn.Linear(2, 2)] * 2)
    with pytest.raises(PartitionError, match="no layer's class matches 'conv'"):
        PipelineModule([nn.Linear(2, 2)] * 2, num_stages=2, partition_method="type:conv")
    with pytest.raises(PartitionError, match="needs measured times"):
        PipelineModule([nn.Linear(2, 2)] * 2, num_stages=2, partition_method="time")
    with pytest.raises(PartitionError, match="layer 1: got int"):
        PipelineModule([nn.Linear(2, 2), 3], num_stages=2)
    with pytest.raises(PartitionError, match="expected a class"):
        LayerSpec(nn.Linear(2, 2))
    with pytest.raises(PartitionError, match="its layers were not found"):
        PipelineModule(nn.Bilinear(2, 2, 2), num_stages=2)
    pm = PipelineModule(
        [nn.Linear(2, 2) for _ in range(4)], num_stages=2, partition_method="time", layer_times=[3, 1, 1, 1]
    )
    assert pm.parts == [0, 1, 4]
    with pytest.raises(StageError, match=r"stage 0 \(rank 0\), layer 0 \(Linear\), micro-batch 0: forward failed"):
        Pipeline(pm, "1f1b", micro_batches=2, loss_fn=nn.functional.mse_loss).step(torch.ones(4, 3), torch.ones(4, 3))


def test_mistakes_are_refused_by_name():
    run_ranks(refused, 2, backend="dsx")


def grid(rank, world):
    pm = PipelineModule(
        [nn.Linear(2, 2) for _ in range(2)], topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    )
    g = pm.mpu()
    # DeepSpeed's "model parallel" is stages and slices together
    assert (g.whole_model.rank, g.whole_model.ranks) == (rank, (0, 1, 2, 3))
    found = dsx_comm.read_mpu(g)
    assert (found.pipe, found.data, found.tensor, found.model) == (g.pipe, g.data, g.model, g.whole_model)
    return g.pipe.rank, g.data.rank, g.model.rank, g.pipe.ranks, g.model.ranks, pm.ckpt_layer_path("d", 0)


def test_the_grid_is_an_mpu():
    results = run_ranks(grid, 4, backend="dsx")
    assert [r[:3] for r in results] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert [r[3] for r in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r[4] for r in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert results[3][5] == "d/layer_01-model_01-model_states.pt"


class WithPenalty(PipelineModule):
    calls = 0

    def get_additional_losses(self):
        self.calls += 1
        return {"penalty": torch.tensor(float(self.calls))}


def losses_beside_the_main_one(rank, world):
    pm = WithPenalty([nn.Linear(2, 2) for _ in range(2)], num_stages=2, loss_fn=nn.functional.mse_loss)
    pipe = Pipeline(pm, "1f1b", micro_batches=4)
    assert pipe.get_additional_losses() == {}
    pipe.step(torch.ones(4, 2), torch.ones(4, 2))
    return pipe.get_additional_losses(), pm.calls


def test_additional_losses_are_averaged_and_known_on_every_rank():
    assert run_ranks(losses_beside_the_main_one, 2, backend="dsx") == [({"penalty": 2.5}, 0), ({"penalty": 2.5}, 4)]


# - Hugging Face


def model_of(kind, layers=4):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40,
            n_positions=16,
            n_embd=16,
            n_layer=layers,
            n_head=2,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=16)
        )
    config = transformers.BertConfig(
        **sizes, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    return transformers.BertForMaskedLM(config)


TIED = {  # name in the pipeline -> name that `named_parameters` gives the shared weight
    "lm_head.weight": "transformer.wte.weight",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def hugging_face(rank, world, cases):
    for kind, schedule, interval in cases:
        pm = PipelineModule(
            model_of(kind), num_stages=world, schedule=schedule, activation_checkpoint_interval=interval
        )
        ids = torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(3))
        mask = torch.ones(4, 8, dtype=torch.long)
        mask[1, 6:] = 0
        loss = Pipeline(pm, schedule, micro_batches=4).step({"input_ids": ids, "attention_mask": mask}, ids)
        model, total = model_of(kind), 0.0
        for i in range(4):
            one = model(input_ids=ids[i : i + 1], attention_mask=mask[i : i + 1], labels=ids[i : i + 1]).loss / 4
            one.backward()
            total += one.item()
        assert float(loss) == pytest.approx(total, rel=1e-5)
        reference = dict(model.named_parameters())
        for name, p in pm.named_parameters():
            expected = reference[name if name in reference else TIED[name]].grad
            torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6, msg=f"{kind} {schedule} {name}")


def test_hugging_face_models_are_split_without_rewriting():
    run_ranks(
        hugging_face, 2, [("gpt2", "1f1b", 0), ("llama", "zbv", 0), ("bert", "1f1b", 1)], backend="dsx", timeout=200
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 3))
def test_hugging_face_matrix(ranks):
    cases = [
        (k, s, i)
        for k in ("gpt2", "llama", "bert")
        for s in ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved")
        for i in (0, 1)
    ]
    cases = [(k, s, i) for k, s, i in cases if ranks == 2 or s not in ("zbv", "interleaved")]
    run_ranks(hugging_face, ranks, cases, backend="dsx", timeout=280)


def not_joined_yet(rank, world):
    for given in (0, True, "2"):  # before anything is made
        with pytest.raises(PipelineError, match="expected a whole number"):
            PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=given)
    assert not dsx_comm.is_initialized()
    if world == 1:
        with pytest.raises(PipelineError, match=r"dsx_comm\.init_distributed"):
            PipelineModule([nn.Linear(4, 4)], num_stages=1)
        return 1
    pipeline = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=world)
    return sum(p.numel() for p in pipeline.parameters())


def test_ranks_of_a_launcher_join_before_they_divide_the_layers():
    assert run_ranks(not_joined_yet, 2, backend=None) == [20, 20]
    assert run_ranks(not_joined_yet, 1, backend=None) == [1]
