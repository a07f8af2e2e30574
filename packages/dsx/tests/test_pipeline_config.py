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
