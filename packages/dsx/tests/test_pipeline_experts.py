"""Experts in pipeline stages under the engine: layers of one's own and converted ones train as one process does."""

import dsx
import pytest
import torch
from dsx_moe import MoE, update_router_bias
from dsx_testkit import RankError, run_ranks
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

WIDTH, MICRO, UPDATES = 6, 2, 2


class Block(nn.Module):
    """(x, sum of balancing losses) to the same."""

    def __init__(self, ep_size):
        super().__init__()
        self.moe = MoE(
            WIDTH, lambda i: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), 4, ep_size,
            k=2, drop_tokens=False, top2_2nd_expert_sampling=False, bias_update_rate=0.01,
        )  # fmt: skip

    def forward(self, carried):
        x, balance = carried
        out, l_aux, _ = self.moe(x)
        return x + out, balance + l_aux


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x.new_zeros(())


def loss_of(carried, labels):
    x, balance = carried
    return nn.functional.mse_loss(x, labels) + 0.1 * balance


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
        **more,
    }


def batches(count):
    """By update and replica: the micro-batches."""
    draw = torch.Generator().manual_seed(2)
    return [
        [[(torch.randn(4, WIDTH, generator=draw), torch.zeros(4, WIDTH)) for _ in range(MICRO)] for _ in range(count)]
        for _ in range(UPDATES)
    ]


def trained(engine, data):
    found = []
    for update in batches(data.size):
        loss = float(engine.train_batch(iter(update[data.rank])))
        found.append((loss, engine.last_step.grad_norm))
    return found


def own_layers(rank, world, stage, ep_size, blocks, folder):
    """Stage 0 may have no experts at all."""
    specs = [dsx_pipe.LayerSpec(First), *(dsx_pipe.LayerSpec(Block, ep_size) for _ in range(blocks))]
    module = dsx_pipe.PipelineModule(
        specs, num_stages=min(world, 2), loss_fn=loss_of, seed_layers=True, base_seed=5, partition_method="uniform"
    )
    engine = dsx.initialize(model=module, config=config(stage))[0]
    found = trained(engine, module.grid.data)
    engine.save_checkpoint(folder, tag="a")
    before = [engine.eval_batch(iter(batches(module.grid.data.size)[0][module.grid.data.rank])).item()]
    trained(engine, module.grid.data)
    engine.load_checkpoint(folder, tag="a")
    again = [engine.eval_batch(iter(batches(module.grid.data.size)[0][module.grid.data.rank])).item()]
    return found, before, again


def one_process(replicas, blocks):
    built = []
    for index, layer in enumerate([First, *[lambda: Block(1)] * blocks]):
        torch.manual_seed(5 + index)
        built.append(layer())
    model, found = nn.Sequential(*built), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    for update in batches(replicas):
        total = 0.0
        for x, y in [pair for replica in update for pair in replica]:
            loss = loss_of(model(x), y) / (MICRO * replicas)
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(model)
        found.append((total, norm))
    return found


@pytest.mark.parametrize(
    ("world", "stage", "ep_size", "blocks"),
    [(1, 1, 1, 1), (2, 1, 1, 1), (4, 0, 2, 1), (4, 2, 2, 3), pytest.param(4, 3, 2, 1, marks=pytest.mark.slow)],
)
def test_layers_of_ones_own_train_as_on_one_process(world, stage, ep_size, blocks, tmp_path):
    expected = one_process(max(1, world // 2), blocks)
    for found, before, again in run_ranks(own_layers, world, stage, ep_size, blocks, str(tmp_path), timeout=120):
        assert found == [pytest.approx(pair, rel=1e-4) for pair in expected]
        assert before == again


def mixtral(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, **more}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))


def tokens(count):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (2, 8), generator=draw) for _ in range(count)]


def converted(rank, world, stage):
    section = {"enabled": True, "autoep_size": 2}
    more = {"pipeline": {"stages": 2}, "expert_parallel": section, "train_micro_batch_size_per_gpu": 2}
    engine = dsx.initialize(model=mixtral(), config=config(stage, **more))[0]
    data, found = engine.module.grid.data, []
    given = tokens(UPDATES * MICRO * data.size)
    for update in range(UPDATES):
        mine = given[update * MICRO * data.size : (update + 1) * MICRO * data.size][data.rank :: data.size]
        found.append((float(engine.train_batch(iter((ids, ids) for ids in mine))), engine.last_step.grad_norm))
    return found


def test_mixtral_cut_and_spread_by_the_configuration_trains_as_on_one_process():
    model, expected = mixtral(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    for update in range(UPDATES):
        total = 0.0
        for ids in tokens(UPDATES * MICRO * 2)[update * MICRO * 2 : (update + 1) * MICRO * 2]:
            loss = model(input_ids=ids, labels=ids).loss / (MICRO * 2)
            loss.backward()
            total += loss.item()
        expected.append((total, float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))))
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(converted, 4, 1, timeout=120):
        assert found == [pytest.approx(pair, rel=1e-4) for pair in expected]


def only_one_stage_has_experts(rank, world):
    layers = [nn.Linear(16, 16), mixtral().model.layers[0].mlp]
    module = dsx_pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine = dsx.initialize(model=module, config=config(0, expert_parallel={"enabled": True, "autoep_size": 1}))[0]
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(4))
    return float(engine.train_batch(iter([(x, x)] * MICRO)))


def no_stage_has_experts(rank, world):
    module = dsx_pipe.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    dsx.initialize(model=module, config=config(0, expert_parallel={"enabled": True, "autoep_size": 1}))


def one_stage_cannot_be_converted(rank, world):
    layers = [nn.Linear(16, 16), mixtral(num_local_experts=3).model.layers[0].mlp]
    module = dsx_pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    dsx.initialize(model=module, config=config(0, expert_parallel={"enabled": True, "autoep_size": 2}))


def test_a_stage_may_have_no_experts_but_not_all_of_them():
    first, second = run_ranks(only_one_stage_has_experts, 2)
    assert first == second
    with pytest.raises(RankError, match="no module of any stage has the form of experts"):
        run_ranks(no_stage_has_experts, 2)


def test_a_stage_whose_experts_cannot_be_converted_ends_all_ranks():
    with pytest.raises(RankError) as caught:
        run_ranks(one_stage_cannot_be_converted, 4)
    text = str(caught.value)
    assert text.count("expected a multiple of ep_size = 2") >= 4, text


def built_for_other_ranks(rank, world):
    first = Block(2)  # over the ranks of the world: [0, 1] and [2, 3]
    topology = dsx.comm.ProcessTopology(("data", "model"), (2, 2))
    dsx.initialize(model=first, mpu=dsx.comm.Mpu(dsx.comm.GroupRegistry(topology)), config=config(0))


def test_layers_that_were_built_for_other_ranks_are_refused():
    with pytest.raises(RankError, match="the layers were built for the expert-parallel ranks"):
        run_ranks(built_for_other_ranks, 4)
