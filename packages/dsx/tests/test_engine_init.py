"""`zero.Init` and `dsx.initialize` together: the same losses as a model built without `Init`, in every precision and
stage; buffers keep their dtype; one model given to two engines.
"""

import logging
import os
from contextlib import nullcontext

import pytest
import torch
from dsx_testkit import run_ranks, tiny
from torch import nn

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def settings(precision, stage, threshold=None):
    zero = {"stage": stage} if threshold is None else {"stage": stage, "stage3_param_persistence_threshold": threshold}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "steps_per_print": None,
        **PRECISIONS[precision],
    }


def trained(config, context, build, batch, given=None, steps=3):
    """Losses of a model that is built inside `context`."""
    import dsx
    import dsx_comm

    with context():
        model = build()
        if context is not nullcontext and int(os.environ["WORLD_SIZE"]) > 1:
            assert dsx_comm.is_initialized()
            assert sum(isinstance(p, dsx.zero.PartitionedParameter) for p in model.parameters()) > 4
    engine, *_ = dsx.initialize(model=model, model_parameters=given and given(model), config=config)
    losses = []
    for step in range(steps):
        loss = batch(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def gpt_batch(rank):
    def loss(engine, step):
        tokens, targets = tiny.TinyGPT(layers=1).example(2, seed=100 * step + rank)
        return nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), targets.flatten())

    return loss


def matrix(rank, world, cases):
    import dsx
    import dsx_comm

    for precision, stage, threshold, joins, with_config in cases:
        if joins == "before" and not dsx_comm.is_initialized():
            dsx_comm.init_distributed()
        config = settings(precision, stage, threshold)
        init = (lambda c=config: dsx.zero.Init(config_dict_or_path=c)) if with_config else dsx.zero.Init
        results = []
        for context in (init, nullcontext):
            engine, losses = trained(
                config, context, lambda: tiny.TinyGPT(layers=1), gpt_batch(rank), given=lambda m: m.parameters()
            )
            assert {p.dtype for p in engine.module.parameters()} == {engine.precision.dtype("params")}
            results.append(losses)
        assert results[0] == results[1], (precision, stage, threshold, joins, with_config)


SAMPLE = [
    [("bf16", 3, None, "after", True), ("fp32", 3, 0, "", True), ("fp16", 3, 100, "", False)],
    [
        ("fp32", 3, None, "before", False),
        ("bf16", 0, None, "", False),
        ("fp16", 1, None, "", True),
        ("bf16", 2, None, "", True),
    ],
]


@pytest.mark.parametrize("cases", SAMPLE, ids=["group made by Init", "group made before"])
def test_losses_are_those_of_a_model_without_init(cases):
    for world in (1, 2):
        run_ranks(matrix, world, cases, backend=None)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("joins", ["before", "after"])
@pytest.mark.parametrize("stage", range(4))
def test_the_whole_matrix(stage, joins, world):
    cases = [
        (precision, stage, threshold, joins, with_config)
        for precision in PRECISIONS
        for threshold in (None, 0)
        for with_config in (True, False)
    ]
    run_ranks(matrix, world, cases, backend=None, timeout=200)


def hugging_face(rank, world, kind, precision, stage, threshold):
    """A model of transformers with random weights, built under `Init`, trains as the same one without."""
    import dsx
    import transformers

    made = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=32,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                hidden_dropout_prob=0,
                attention_probs_dropout_prob=0,
            )
        ),
    }[kind]

    def build():
        torch.manual_seed(3)
        return made()

    def batch(engine, step):
        tokens = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        return engine(input_ids=tokens, labels=tokens).loss

    config = settings(precision, stage, threshold)
    results = [
        trained(config, context, build, batch)
        for context in (lambda: dsx.zero.Init(config_dict_or_path=config), nullcontext)
    ]
    assert results[0][1] == results[1][1]
    first, second = (engine.module for engine, _ in results)
    for (name, buffer), (_, other) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert buffer.dtype == other.dtype and torch.equal(buffer, other), name


@pytest.mark.parametrize(
    ("kind", "precision", "stage", "threshold"), [("llama", "bf16", 3, None), ("gpt2", "fp32", 3, 0)]
)
def test_models_of_hugging_face(kind, precision, stage, threshold):
    pytest.importorskip("transformers")
    run_ranks(hugging_face, 2, kind, precision, stage, threshold, backend=None, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_more_models_of_hugging_face(kind, precision, stage):
    pytest.importorskip("transformers")
    for threshold in (None, 0):
        run_ranks(hugging_face, 2, kind, precision, stage, threshold, backend=None, timeout=120)


class Rotary(nn.Module):
    """A layer with frequencies that 16 bits cannot hold, a counter, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("count", torch.tensor(3), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) + (4096 * self.inv_freq).sin().sum().to(x.dtype)


def buffers(rank, world, stage):
    import dsx

    for asked, expected in ((None, torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        config = {**settings("bf16", stage), "data_types": {"buffer_dtype": asked}}
        model = Rotary()
        exact = model.inv_freq.clone()
        if asked == "fp32":
            model.norm = nn.Identity()  # torch's batch norm on a CPU wants statistics in its weights' dtype
        engine, *_ = dsx.initialize(model=model, config=config)
        assert model.inv_freq.dtype == expected and model.count.dtype == torch.int64
        assert torch.equal(model.inv_freq.float(), exact) == (asked != "bf16")
        if asked != "fp32":
            assert model.norm.running_mean.dtype == torch.bfloat16
        out = engine(torch.randn(4, 8).bfloat16())
        engine.backward(out.float().square().mean())
        engine.step()
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_dtype_unless_one_is_asked_for(stage):
    for world in (1, 2):
        run_ranks(buffers, world, stage)


def engines(rank, world, first_stage, second_stage):
    """A second engine of one model takes it over; the first is destroyed, with a warning."""
    from dsx.engine.errors import EngineError

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dsx_zero").addHandler(handler)
    model = tiny.TinyGPT(layers=1)
    build = lambda: model  # noqa: E731
    first, early = trained(settings("fp32", first_stage, 0), nullcontext, build, gpt_batch(rank))
    assert not lines
    second, late = trained(settings("bf16", second_stage, 0), nullcontext, build, gpt_batch(rank))
    assert any("is released" in line for line in lines) == (rank == 0)
    assert late[0] < early[0] and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(EngineError, match="destroyed"):
        first.step()
    second.destroy()
    _, last = trained(settings("bf16", first_stage), nullcontext, build, gpt_batch(rank))
    assert len(lines) == (rank == 0) and last[0] < late[0]


@pytest.mark.parametrize(("first", "second"), [(0, 3), (3, 1), (3, 3)])
def test_a_second_engine_of_one_model(first, second):
    run_ranks(engines, 2, first, second)
