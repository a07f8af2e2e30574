"""An engine cannot be copied or pickled, and says so; its model can. Copies of its values (EMA) and checkpoints."""

import copy
import pickle

import pytest
import torch
from dsx_testkit import run_ranks, tiny


def test_an_engine_says_why_it_cannot_be_copied_and_its_model_can():
    import dsx
    from dsx.engine.errors import EngineError

    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = dsx.initialize(model=tiny.MLP(), config=settings)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(EngineError, match=r"cannot be copied or pickled.*save_checkpoint.*engine\.module"):
            way(engine)
    for way in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin = way(engine.module)
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), engine.module.parameters(), strict=True))


def engine_of(stage, seed, dtype, **sections):
    import dsx

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **sections,
    }
    torch.manual_seed(seed)
    return dsx.initialize(model=Net(), config=settings)[0]


class Net(torch.nn.Module):
    """Odd sizes, a frozen parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        self.first.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.last(torch.tanh(self.first(x))).float().square().mean()


def train(engine, steps):
    for step in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step)).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x))
        engine.step()


def whole(copied):
    state = copied.state_dict()
    updates = state.pop("updates")
    return updates, {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


def save_with_copies(rank, world, folder, stage, dtype, later):
    """An EMA that is equal to one of whole tensors, bit for bit; updates without a collective."""
    import dsx_comm

    engine = engine_of(stage, 0, dtype, checkpoint={"asynchronous": later})
    ema, teacher = engine.optimizer.copy_of(), engine.optimizer.copy_of(engine.module.last)
    engine.register_for_checkpointing(ema, name="ema")
    engine.register_for_checkpointing(teacher)
    expected = {name: value.clone() for name, value in whole(ema)[1].items()}
    for _ in range(3):
        train(engine, 1)
        now = whole(engine.optimizer.copy_of())[1]
        with dsx_comm.count_traffic() as traffic:
            ema.update(0.75)
        assert traffic.calls() == 0
        for name, value in expected.items():
            value.copy_(now[name]) if name == "seen" else value.lerp_(now[name], 0.25)
    engine.save_checkpoint(folder)
    updates, found = whole(ema)
    assert updates == 3 and found.keys() == expected.keys()
    for name, value in expected.items():
        if name != "first.bias":  # frozen: lerp of equal values
            assert torch.equal(found[name], value), name
    first = whole(teacher)
    train(engine, 1)
    ema.update(0.0)  # not in the checkpoint, also if that is written later
    engine.wait_for_checkpoints()
    return (updates, found), first


def load_copies(rank, world, folder, stage, dtype):
    engine = engine_of(stage, 1, dtype)
    ema, teacher = engine.optimizer.copy_of(), engine.optimizer.copy_of(engine.module.last)
    engine.register_for_checkpointing(ema, name="ema")
    engine.register_for_checkpointing(teacher)
    before = whole(ema)[1]
    engine.load_checkpoint(folder, load_optimizer_states=False)
    after = whole(ema)
    assert after[0] == 0 and all(torch.equal(after[1][n], before[n]) for n in before)  # told in a warning
    engine.load_checkpoint(folder)
    with ema.applied(), torch.no_grad():
        engine(torch.ones(2, 5).to(next(engine.module.parameters()).dtype))
    return whole(ema), whole(teacher)


@pytest.mark.parametrize("stage, dtype, later", [(0, "fp32", False), (1, "bf16", False), (2, "fp32", True),
                                                 (3, "fp32", False), (3, "bf16", True)])  # fmt: skip
def test_copies_are_saved_with_the_engine_and_load_at_other_numbers_of_ranks(tmp_path, stage, dtype, later):
    saved = run_ranks(save_with_copies, 2, tmp_path, stage, dtype, later)[0]
    for world, other in ((1, 3), (3, 3 - stage), (2, stage)):
        loaded = run_ranks(load_copies, world, tmp_path, other, dtype)[0]
        for (updates, values), (expected, others) in zip(loaded, saved, strict=True):
            assert updates == expected and values.keys() == others.keys()
            for name, value in others.items():
                assert torch.equal(values[name], value) or name == "seen", (world, other, name)


def other_copies(rank, world, folder):
    import logging

    from dsx.engine.errors import EngineArgumentError

    told = []

    class Keep(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    engine = engine_of(3, 0, "fp32")
    for wrong, why in (({"per_rank": True}, "leave that out"), ({"name": "a/b"}, "expected letters, digits")):
        with pytest.raises(EngineArgumentError, match=why):
            engine.register_for_checkpointing(engine.optimizer.copy_of(), **wrong)
    ema = engine.optimizer.copy_of()
    engine.register_for_checkpointing(ema, name="ema")
    with pytest.raises(EngineArgumentError, match="is registered already"):
        engine.register_for_checkpointing(ema, name="again")
    train(engine, 1)
    engine.save_checkpoint(folder)

    renamed = engine_of(3, 1, "fp32")
    renamed.register_for_checkpointing(renamed.optimizer.copy_of(), name="teacher")
    logger = logging.getLogger("dsx")
    logger.addHandler(keep := Keep())
    renamed.load_checkpoint(folder)
    logger.removeHandler(keep)
    if rank == 0:
        assert any("no state of the registered teacher" in text for text in told), told
        assert any("has states of ema" in text for text in told), told

    part = engine_of(3, 1, "fp32")
    part.register_for_checkpointing(part.optimizer.copy_of(part.module.last), name="part")
    part.save_checkpoint(folder / "part")
    more = engine_of(3, 1, "fp32")
    copied = more.optimizer.copy_of()
    more.register_for_checkpointing(copied, name="part")
    before = whole(copied)[1]
    with pytest.raises(Exception, match=r"first\.weight: the copy 'part' has values of it"):
        more.load_checkpoint(folder / "part")
    assert all(torch.equal(value, before[name]) for name, value in whole(copied)[1].items())


def test_other_copies_are_told_by_name(tmp_path):
    run_ranks(other_copies, 2, tmp_path)
