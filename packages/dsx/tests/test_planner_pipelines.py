"""Pipelines: a plan says exactly what every real rank holds, sends and computes, for every schedule and ZeRO stage."""

import contextlib
import json

import pytest
import torch
from dsx_testkit import run_ranks
from dsx_testkit.operations import Operations
from torch import nn

dsx_pipe = pytest.importorskip("dsx_pipe")

WIDTH, WORDS, LENGTH = 48, 64, 8
HOST = {"device": "cpu"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.1)

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


class Loss(nn.Module):
    """A last layer whose output is the loss: nothing else is needed where the configuration cuts a model."""

    def forward(self, x):
        return x.float().square().mean()


def head(embedding, x):
    return x @ embedding.weight.T


def token_loss(logits, labels):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def cut_by_configuration():
    return nn.Sequential(Embedding(), *(Block() for _ in range(5)), nn.Linear(WIDTH, 24), Loss())


def made_by_script(schedule="1f1b", chunks=None, stages=2, tied=True):
    """Layers with a weight that the first and the last stage share."""
    last = (
        dsx_pipe.TiedLayerSpec("words", Embedding, forward_fn=head)
        if tied
        else dsx_pipe.LayerSpec(nn.Linear, WIDTH, WORDS)
    )
    first = dsx_pipe.TiedLayerSpec("words", Embedding) if tied else dsx_pipe.LayerSpec(Embedding)
    layers = [first, *(dsx_pipe.LayerSpec(Block) for _ in range(4)), last]
    return dsx_pipe.PipelineModule(layers, num_stages=stages, loss_fn=token_loss, schedule=schedule, chunks=chunks)


def settings(stage, micro_batches=4, *, stages=2, low=False, **zero):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 0,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"stages": stages},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **({"bf16": {"enabled": True}} if low else {}),
    }


def by_script(*arguments, **keywords):
    return lambda: made_by_script(*arguments, **keywords)


TWO = {
    "stage 0": (cut_by_configuration, settings(0)),
    "stage 1, tied": (by_script(), settings(1, low=True)),
    "stage 2, optimizer on the host": (cut_by_configuration, settings(2, offload_optimizer=HOST)),
    "stage 3": (cut_by_configuration, settings(3, 3)),
    "more micro-batches than are replayed": (cut_by_configuration, settings(1, 11, low=True)),
    "weights apart": (by_script("zb-h1", tied=False), settings(1, 9)),
    "all forwards first": (by_script("gpipe"), settings(0, 8)),
    "two stages a rank": (by_script("interleaved", 2, tied=False), settings(0, 10)),
    "two stages a rank, as a V": (by_script("zbv", tied=False), settings(1, 9)),
}
FOUR = {
    "two copies, stage 1": (by_script(), settings(1, low=True)),
    "two copies, stage 2": (cut_by_configuration, settings(2, 8)),
    "two copies, stage 3": (by_script(tied=False), settings(3, 8)),
    "four stages": (by_script(stages=4, tied=False), settings(0, 14, stages=4)),
    "four stages, weights apart": (by_script("zb-h1", stages=4), settings(1, 13, stages=4)),
}


def pair():
    return torch.zeros(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, dtype=torch.int64)


def trained(make, config):
    """What a real rank holds before the update of its fourth step, and what it sends and computes in that step."""
    import dsx
    import dsx_comm
    from dsx.engine.hooks import StepHook

    class Look(StepHook):
        held = None

        def before_update(self):
            self.held = engine.optimizer.state_bytes_by_tier()

    torch.manual_seed(0)
    engine, *_ = dsx.initialize(model=make(), config=json.loads(json.dumps(config)))
    look = Look()
    engine._parts.watch.hooks.append(look)
    steps = config["gradient_accumulation_steps"]
    for step in range(4):
        operations = Operations()
        with dsx_comm.count_traffic() as traffic, operations if step == 3 else contextlib.nullcontext():
            engine.train_batch(iter([pair()] * steps))
        sent = traffic.by_op()
    kept = engine._pipe.most_kept()
    # The optimizer's kernels are not dispatched: a plan counts 12 operations for each element with its two states.
    updates = 12 * engine.optimizer.state_bytes()["optimizer"] // 8
    engine.destroy()
    return look.held, sent, operations.flops + updates, kept


def trained_all(rank, world, cases):
    torch.set_num_threads(1)
    return {name: trained(*case) for name, case in cases.items()}


def check(world, cases):
    from dsx.planning import Machine, plan

    real = run_ranks(trained_all, world, cases, timeout=400)
    here = Machine.of_this_host()
    for name, (make, config) in cases.items():
        found = plan(make, config, world_size=world, machine=here, batch=pair())
        stages = config["pipeline"]["stages"]
        assert [one.rank for one in found.pipeline.ranks] == [place * (world // stages) for place in range(stages)]
        for one in found.pipeline.ranks:
            held, sent, flops, kept = real[one.rank][name]
            planned = {kind: tiers for kind, tiers in one.bytes.items() if kind != "model buffers"}
            assert planned == held, (name, one.rank, planned, held)
            assert set(one.messages) == set(sent), (name, one.rank, one.messages, sent)
            for op, (calls, nbytes) in sent.items():
                # A device gets header and tensors of a value between stages as two messages, a CPU in one frame (0104).
                # These tensors fill the frames to the byte.
                each = 2 if op in ("isend", "recv") else 1
                assert one.messages[op] == (each * calls, pytest.approx(nbytes, rel=1e-12)), (name, one.rank, op)
            by_link = one.traffic["inside host"] + one.traffic["between hosts"]
            assert by_link == pytest.approx(sum(n for _, n in one.messages.values()), rel=1e-9), name
            assert one.flops == flops, (name, one.rank, one.flops / flops)
            assert one.kept == sum(kept.values()), (name, one.rank)


SOME = ("stage 1, tied", "two stages a rank")


def test_two_ranks():
    check(2, {name: TWO[name] for name in SOME})


@pytest.mark.slow
def test_two_ranks_all():
    check(2, TWO)


@pytest.mark.slow
def test_four_ranks_all():
    check(4, FOUR)


def test_a_model_of_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    from dsx.planning import plan

    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 6, "n_head": 4, "n_embd": 32,
              "vocab_size": 64, "n_positions": 16}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = plan(tmp_path, settings(1, 4, stages=1), world_size=4, machine="A100-80", changes=False)
    cut = plan(tmp_path, settings(1, 4, stages=2), world_size=4, machine="A100-80", changes=False)
    assert cut.parameters == whole.parameters
    assert sum(one.parameters for one in cut.pipeline.ranks) == cut.parameters + 64 * 32  # the tied weight has a copy
    assert cut.layout["data"] == 2 and cut.tokens == whole.tokens // 2 == 2 * 4 * 2 * 16
    assert whole.pipeline is None and cut.rank in (0, 2)


FAST = {"link_bandwidth": 1e18, "constants": {"operator_seconds": 0.0, "message_seconds": 0.0}}


def spread(name, count, stages=4, micro_batches=8, **machine):
    """The plan of `count` equal layers without weights of note beside them."""
    from dsx.planning import Machine, plan

    made = Machine.from_dict({**Machine.named("H100-SXM").to_dict(), **machine})

    def make():
        layers = [dsx_pipe.LayerSpec(nn.Linear, 512, 512) for _ in range(count)]
        return dsx_pipe.PipelineModule(
            layers, num_stages=stages, loss_fn=lambda x, _: x.float().mean(), schedule=name, partition_method="uniform"
        )

    config = {**settings(0, micro_batches, stages=stages), "train_micro_batch_size_per_gpu": 4096}
    batch = (torch.zeros(4096, 512), torch.zeros(1))
    return plan(make, config, world_size=stages, machine=made, batch=batch, changes=False)


@pytest.mark.parametrize(("name", "rounds"), [("gpipe", 3), ("1f1b", 3)])
def test_the_bubble_is_that_of_the_schedule(name, rounds):
    """(p - 1) / (m + p - 1) for equal stages; links are fast enough to be nothing."""
    found = spread(name, 32, **FAST)  # the first layer's input has no gradient: one layer of eight does less
    assert found.pipeline.bubble_share == pytest.approx(rounds / (8 + rounds), abs=0.04)
    assert found.pipeline.schedule == name and found.pipeline.micro_batches == 8
    longest = max(one.forward_seconds + one.backward_seconds for one in found.pipeline.ranks)
    assert found.step_seconds >= (8 + rounds) * longest * 0.98
    assert found.parts["bubble"] > 0 and found.mfu > 0
    ends = [end for _, _, _, end in found.pipeline.timeline]
    assert max(ends) == pytest.approx(found.pipeline.seconds)


def test_more_micro_batches_shrink_the_bubble_and_slow_links_lengthen_the_step():
    few, many = spread("1f1b", 8, micro_batches=4, **FAST), spread("1f1b", 8, micro_batches=40, **FAST)
    assert many.pipeline.bubble_share < 0.2 and few.pipeline.bubble_share > 0.4
    assert many.step_seconds < 7 * few.step_seconds  # ten times the work
    slow = spread("1f1b", 8, micro_batches=40, **{**FAST, "link_bandwidth": 1e10})
    assert slow.step_seconds > 2 * many.step_seconds
    assert slow.pipeline.bubble_share > many.pipeline.bubble_share


def test_stages_keep_what_the_schedule_keeps():
    """1F1B: the first stage keeps activations of as many micro-batches as there are stages, the last of one."""
    alike = {"micro_batches": 16, "communicator_bytes": 1}  # a stage in the middle would have one communicator more
    ordered, at_once = spread("1f1b", 8, **alike), spread("gpipe", 8, **alike)
    assert [one.kept for one in ordered.pipeline.ranks] == [4, 3, 2, 1]
    assert [one.kept for one in at_once.pipeline.ranks] == [16, 16, 16, 16]
    assert at_once.peak_bytes > 1.5 * ordered.peak_bytes
    assert ordered.rank == max(ordered.pipeline.ranks, key=lambda one: one.peak_bytes + one.fragmentation_bytes).rank


def test_mistakes_are_named():
    from dsx.planning import PlanError, plan

    def ask(make=cut_by_configuration, stages=2, batch=None, world=4, **options):
        return plan(make, settings(0, stages=stages), world_size=world, machine="A100-80",
                    batch=pair() if batch is None else batch, **options)  # fmt: skip

    with pytest.raises(PlanError, match="PipelineModule of 2 stages"):
        ask(made_by_script, stages=4)
    with pytest.raises(PlanError, match="PipelineModule of 2 stages"):
        ask(made_by_script, stages=1)
    with pytest.raises(PlanError, match="without labels"):
        ask(made_by_script, batch=pair()[0])
    with pytest.raises(PlanError, match="expected a multiple of 3"):
        ask(stages=3)
    with pytest.raises(PlanError, match="last stage of a pipeline has its own"):
        ask(loss=lambda output: output)
    with pytest.raises(PlanError, match="cannot be replayed"):
        ask(batch=(torch.zeros(2, LENGTH), None))  # an embedding of numbers that are not whole
    with pytest.raises(ValueError, match="layers for 16 stages"):
        ask(stages=16, world=16)
    ask()


def test_a_pipeline_as_json_text_and_page():
    from dsx.planning import Plan, plan
    from dsx_plan.page import plan_page
    from dsx_plan.text import describe_plan

    found = plan(cut_by_configuration, settings(1), world_size=4, machine="H100-SXM", batch=pair())
    assert Plan.from_json(found.to_json()) == found
    text = describe_plan(found)
    assert text.count("model state of a rank") == 1
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("pipeline 1f1b: 4 micro-batches, bubble"))
    assert lines[start + 1].split()[:3] == ["rank", "stages", "parameters"]
    assert [line.split()[0] for line in lines[start + 2 : start + 4]] == ["0", "2"]
    page = plan_page(found)
    assert "Pipeline, 1f1b" in page and page.count("<title>0F") == 4 and 'aria-label="schedule' in page
