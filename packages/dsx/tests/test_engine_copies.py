"""An engine cannot be copied or pickled, and says so; its model can."""

import copy
import pickle

import pytest
import torch
from dsx_testkit import tiny


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
