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


def copy_beside(rank, world, folder, stage, saves):
    """Register a copy, or be told the way; then that way, at this number of ranks."""
    import dsx
    import torch.distributed.checkpoint as dcp
    from dsx.engine.errors import EngineArgumentError

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    torch.manual_seed(0 if saves else 1)
    engine, *_ = dsx.initialize(model=tiny.MLP(), config=settings)
    ema = engine.optimizer.copy_of()
    if world > 1 and stage > 0:
        for per_rank in (False, True):
            with pytest.raises(EngineArgumentError, match=r"sharded over the ranks.*checkpoint\.save"):
                engine.register_for_checkpointing(ema, name="ema", per_rank=per_rank)
    else:
        engine.register_for_checkpointing(ema, name="ema")
    ema.update(0.5)
    if saves:
        dcp.save({"copy": ema}, checkpoint_id=folder / "copy")
        engine.save_checkpoint(folder / "engine")  # what was refused is not registered
    else:
        dcp.load({"copy": ema}, checkpoint_id=folder / "copy")
    state = ema.state_dict()
    updates = state.pop("updates")
    return updates, {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_sharded_copy_is_refused_by_checkpoints_and_the_named_way_loads_elsewhere(tmp_path, stage):
    saved = run_ranks(copy_beside, 2, tmp_path, stage, True)[0]
    loaded = run_ranks(copy_beside, 1, tmp_path, 3, False)[0]
    assert saved[0] == loaded[0] == 1
    assert saved[1].keys() == loaded[1].keys()
    for name, value in saved[1].items():
        assert torch.equal(value, loaded[1][name]), name
