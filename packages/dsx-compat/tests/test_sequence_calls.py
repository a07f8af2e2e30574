"""The calls that Transformers' Trainer (with Accelerate), and ArcticTraining make around the Ulysses classes, in their
order, on two ranks: transcripts, not the packages. Losses of updates are those of one process with whole samples, in
which prompts do not count and ranks have other numbers of tokens that do.
"""

import dsx_compat
import pytest
import torch
import torch.distributed.nn.functional as differentiable
from dsx_testkit import run_ranks
from dsx_testkit.sequences import small_llama

STEPS, ACCUMULATION, LENGTH, LR = 2, 2, 15, 1e-2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def samples(count):
    """As trl gives them: the labels of prompts are -100, of another length in each sample; of one, nearly all are."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(count):
        tokens = torch.randint(0, 40, (1, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[:, : (3, 12, 0, 7)[number % 4]] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def one_process(accumulation):
    model, found = small_llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = iter(samples(STEPS * accumulation))
    for _ in range(STEPS):
        for _ in range(accumulation):
            loss = model(**next(data)).loss
            (loss / accumulation).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def prepared(rank, world, accumulation, stage, **length):
    """What `Accelerator.prepare` does under `ParallelismConfig(sp_size=world)`: registers, starts the engine with the
    groups, wraps the loader.
    """
    dsx_compat.activate()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    model = small_llama()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, sequence_parallel_size=world, core_attn_implementation="sdpa", micro_batch_size=1,
        **length,
    )  # fmt: skip
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=LR), mpu=mpu,
        config={
            **CONFIG, "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )  # fmt: skip
    group = groups._get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(
        samples(STEPS * accumulation)[rank::world], sp_rank=groups._get_sequence_parallel_rank(), sp_group=group,
        sp_world_size=groups._get_sequence_parallel_world_size(), device=engine.device,
    )  # fmt: skip
    return engine, optimizer, loader, group


def trainer(rank, world):
    """The Trainer hands `shift_labels` over as labels too, takes the model's loss, and divides by the micro-batches."""
    engine, _, loader, group = prepared(rank, world, ACCUMULATION, 3, seq_length_is_variable=True)
    found = []
    engine.train()
    for number, inputs in enumerate(loader):
        if "labels" not in inputs:
            inputs["labels"] = inputs["shift_labels"]
        outputs = engine(**inputs, num_items_in_batch=None)
        losses = torch.stack(differentiable.all_gather(outputs.loss, group=group))
        counts = torch.stack(differentiable.all_gather((inputs["shift_labels"] != -100).view(-1).sum(), group=group))
        loss = (torch.where(counts > 0, losses, torch.zeros_like(losses)) * counts).sum() / counts.sum().clamp(min=1)
        engine.set_gradient_accumulation_boundary(is_boundary=number % ACCUMULATION == ACCUMULATION - 1)
        engine.backward(loss / ACCUMULATION, scale_wrt_gas=False)
        engine.step()
        found.append(loss.item())
    return found


def arctic(rank, world):
    """ArcticTraining calls the model below the head, and the head on one piece of its tokens after the other. At
    stage 3 the parameters of both are one unit, which is gathered where the whole model is called only: refused there.
    """
    engine, _, loader, group = prepared(rank, world, 1, 2, seq_length=LENGTH, seq_length_is_variable=False)
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def of_a_piece(model, hidden, labels):
        logits = model.lm_head(hidden)
        if (labels == -100).all():
            return (logits.sum() * 0.0).float()
        loss = model.loss_function(logits=logits, labels=None, vocab_size=40, shift_labels=labels)
        return loss * (labels != -100).sum()

    found = []
    for batch in loader:
        labels, model = batch["shift_labels"], engine.module
        hidden = model.model(**batch, use_cache=False).last_hidden_state
        total = TiledFusedLogitsLoss.apply(of_a_piece, model, hidden, labels, None, 3, [model.lm_head.weight], "sum")
        count = (labels != -100).sum()
        losses = differentiable.all_gather(total / count.clamp(min=1), group=group)
        counts = differentiable.all_gather(count, group=group)
        loss = sum(one * n for one, n in zip(losses, counts)) / sum(counts)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("calls", "accumulation"), [(trainer, ACCUMULATION), (arctic, 1)], ids=["trainer", "arctic"])
def test_losses_are_those_of_one_process(calls, accumulation):
    pytest.importorskip("transformers")
    expected = one_process(accumulation)
    for found in run_ranks(calls, 2):
        assert found == pytest.approx(expected, rel=1e-5)
