"""`pipeline` and `tensor_parallel` sections: an ordinary model is cut as the configuration says, and trains as it
did.
"""

import logging

import dsx
import pytest
import torch
from dsx.engine.errors import EngineArgumentError
from dsx_testkit import RankError, run_ranks
from torch import nn

pytest.importorskip("dsx_pipe")
transformers = pytest.importorskip("transformers")

MICRO_BATCHES = 2


def model():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 16, "vocab_size": 32, "n_positions": 8}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        **more,
    }


def tokens(count):
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 32, (2, 8), generator=draw) for _ in range(count)]


def one_process(replicas):
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.0)
    per_update, found = MICRO_BATCHES * replicas, []
    batches = tokens(3 * per_update)
    for update in range(3):
        total = 0.0
        for batch in batches[update * per_update : (update + 1) * per_update]:
            loss = whole(input_ids=batch, labels=batch).loss / per_update
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
    return found


def _pipeline(rank, world_size, stage, more):
    torch.manual_seed(rank)
    engine = dsx.initialize(model=model(), config=config(zero_optimization={"stage": stage}, **more))[0]
    data, found = engine.module.grid.data, []
    per_update = MICRO_BATCHES * data.size
    batches = tokens(3 * per_update)
    for update in range(3):
        mine = batches[update * per_update : (update + 1) * per_update][data.rank :: data.size]
        loss = float(engine.train_batch(iter((batch, batch) for batch in mine)))
        found.append((loss, engine.last_step.grad_norm))
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (4, 0)])
def test_stages_by_configuration(world_size, stage):
    expected = one_process(world_size // 2)
    for found in run_ranks(_pipeline, world_size, stage, {"pipeline": {"stages": 2}}, timeout=120):
        assert found == [pytest.approx(pair, rel=1e-3) for pair in expected]


def _slices(rank, world_size, stage, more):
    engine = dsx.initialize(
        model=model() if rank == 0 else transformers.GPT2LMHeadModel(model().config),  # other ranks have other values
        config=config(
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
            tensor_parallel={"autotp_size": 2, **more},
        ),
    )[0]
    replicas, mine, found = world_size // 2, rank // 2, []
    batches = tokens(3 * MICRO_BATCHES * replicas)
    for update in range(3):
        start = update * MICRO_BATCHES * replicas
        for batch in batches[start : start + MICRO_BATCHES * replicas][mine::replicas]:
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
        found.append(engine.last_step.grad_norm)
    return found


SPLIT = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("world_size", "stage", "more"),
    [(2, 0, {}), (2, 3, {"tp_overlap_comm": True}), (4, 2, {}), (2, 1, SPLIT), (4, 3, SPLIT)],
)
def test_slices_by_configuration(world_size, stage, more):
    """With the sequence split, norms and biases between the slices have their gradients added up at every stage."""
    expected = [norm for _, norm in one_process(world_size // 2)]
    for found in run_ranks(_slices, world_size, stage, more, timeout=120):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("world_size", "stage", "more"),
    [
        (4, 1, {}), (4, 2, SPLIT),
        (8, 1, SPLIT),  # two replicas: gradients are sharded, too
        *(pytest.param(8, stage, SPLIT, marks=pytest.mark.slow) for stage in (0, 2, 3)),
    ],
)  # fmt: skip
def test_both_together(world_size, stage, more):
    both = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2, **more}}
    expected = one_process(world_size // 4)
    for found in run_ranks(_pipeline, world_size, stage, both, timeout=240):
        assert found == [pytest.approx(pair, rel=1e-3) for pair in expected]


def _refused(rank, world_size, kind):
    built = model()
    arguments = {"model": built}
    if kind == "optimizer":
        arguments["optimizer"] = torch.optim.AdamW(built.parameters())
    if kind == "groups":
        arguments["model_parameters"] = [{"params": list(built.parameters())[:2]}]
    dsx.initialize(**arguments, config=config(pipeline={"stages": 3 if kind == "ranks" else 2}))


@pytest.mark.parametrize(
    ("kind", "says"),
    [("optimizer", "pass a callable"), ("groups", "leave it out"), ("ranks", "2 ranks, expected a multiple of 3")],
)
def test_what_does_not_fit_is_refused_before_anything_is_cut(kind, says):
    with pytest.raises(RankError, match=says):
        run_ranks(_refused, 2, kind, timeout=60)


def test_an_mpu_beside_the_sections_is_refused():
    with pytest.raises(EngineArgumentError, match="leave out one of the two"):
        dsx.initialize(model=model(), config=config(pipeline={"stages": 2}), mpu=object())


class Groups:
    """An mpu of four ranks: neighbours share a model, or, strided, the ranks two apart."""

    def __init__(self, strided, slices=2):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        step = world // slices if strided else 1
        rows = [[r for r in range(world) if (r % step, r // (step * slices)) == place] for place in
                sorted({(r % step, r // (step * slices)) for r in range(world)})]  # fmt: skip
        columns = [list(column) for column in zip(*rows)]
        self.model = [(torch.distributed.new_group(ranks), ranks) for ranks in rows]
        self.data = [(torch.distributed.new_group(ranks), ranks) for ranks in columns]
        for kind in ("model", "data"):
            group, ranks = next(pair for pair in getattr(self, kind) if rank in pair[1])
            for name, value in (("group", group), ("world_size", len(ranks)), ("rank", ranks.index(rank))):
                setattr(self, f"get_{kind}_parallel_{name}", lambda value=value: value)


def groups_of(net):
    """Two parameter groups; the second trains more slowly. Without the embedding of positions, which is frozen."""
    net.transformer.wpe.weight.requires_grad_(False)
    slow = [p for name, p in net.named_parameters() if "mlp" in name]
    fast = [p for name, p in net.named_parameters() if "mlp" not in name and p.requires_grad]
    return [{"params": fast}, {"params": slow, "lr": 1e-3}]


def one_process_of_groups(replicas):
    whole, found = model(), []
    optimizer = torch.optim.AdamW(groups_of(whole), lr=1e-2, weight_decay=0.0)
    batches = tokens(3 * replicas)
    for update in range(3):
        for batch in batches[update * replicas : (update + 1) * replicas]:
            (whole(input_ids=batch, labels=batch).loss / replicas).backward()
        found.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _slices_of_groups(rank, world_size, stage, strided, as_optimizer):
    dsx.init_distributed()
    net, mpu = model(), Groups(strided)
    optimizer = torch.optim.AdamW(groups_of(net), lr=1e-2, weight_decay=0.0) if as_optimizer else None
    settings = config(
        zero_optimization={"stage": stage}, tensor_parallel={"autotp_size": 2}, gradient_accumulation_steps=1
    )
    if as_optimizer:
        del settings["optimizer"]
    more = {"optimizer": optimizer} if as_optimizer else {"model_parameters": groups_of(net)}
    engine = dsx.initialize(model=net, config=settings, mpu=mpu, **more)[0]
    mine, found, batches = mpu.get_data_parallel_rank(), [], tokens(3 * (world_size // 2))
    for update in range(3):
        batch = batches[update * (world_size // 2) + mine]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        found.append(engine.last_step.grad_norm)
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "strided", "as_optimizer"),
    [(2, 3, False, False), (4, 1, True, True)],
)
def test_slices_beside_an_optimizer_and_an_mpu(world_size, stage, strided, as_optimizer):
    """The optimizer and its groups get the slices; the groups of the mpu are taken, whatever their order is."""
    expected = one_process_of_groups(world_size // 2)
    for found in run_ranks(_slices_of_groups, world_size, stage, strided, as_optimizer, timeout=120):
        assert found == pytest.approx(expected, rel=1e-3)


def _slices_refused(rank, world_size):
    dsx.init_distributed()
    net = model()
    before = [p.data_ptr() for p in net.parameters()]
    stepped = torch.optim.AdamW(net.parameters())
    net(input_ids=tokens(1)[0], labels=tokens(1)[0]).loss.backward()
    stepped.step()
    settings = config(tensor_parallel={"autotp_size": 2})
    for wrong, says in (
        ({"mpu": Groups(False, slices=1)}, "got 1 model-parallel and 2 data-parallel ranks, expected 2 and 1"),
        ({"optimizer": stepped}, "states of the whole model"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)}, "no parameter of the model"),
        ({"model_parameters": [{"params": [torch.ones(1)]}]}, "no parameter of the model"),
    ):
        with pytest.raises(EngineArgumentError, match=says):
            dsx.initialize(model=net, config=settings, **wrong)
    assert [p.data_ptr() for p in net.parameters()] == before


def test_what_slices_cannot_take_is_refused_before_anything_is_cut():
    run_ranks(_slices_refused, 2, timeout=60)


def _unused(rank, world_size, sections):
    lines = []
    keep = logging.Handler()
    keep.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx").addHandler(keep)
    dsx.initialize(model=model(), config=config(**sections))
    return [line for line in lines if "never used" in line]


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 1}}, None),
        ({"pipeline": {"stages": 2}}, None),
        (
            {"tensor_parallel": {"tp_overlap_comm": True}, "pipeline": {"partition": "uniform"}},
            "tensor_parallel, pipeline",
        ),
    ],
)  # fmt: skip
def test_a_section_without_an_effect_is_named_and_no_other(sections, names):
    found = run_ranks(_unused, 2, sections, timeout=60)[0]
    assert [names in line for line in found] == [True] if names else found == []
