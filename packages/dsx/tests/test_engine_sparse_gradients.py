"""`sparse_gradients: true`: an engine with a sparse embedding trains as one with a dense one, and sends its rows."""

import dsx
import dsx_comm
import pytest
import torch
from dsx.errors import DsxConfigError
from dsx_testkit import assert_close_named, run_ranks
from torch import nn


class Net(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(1000, 8, sparse=sparse), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.words(x)).square().mean()


def config(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.01,
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.05}},
        **more,
    }


def train(rank, world, folder):
    found = {}
    for sparse in (False, True):
        engine, *_ = dsx.initialize(model=Net(sparse), config=config(sparse_gradients=sparse))
        for step in range(3):
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                with dsx_comm.count_traffic() as traffic:
                    engine.backward(engine(torch.randint(0, 1000, (2, 5), generator=generator)))
                engine.step()
            if step == 1:
                engine.save_checkpoint(folder, tag=f"{sparse}")
        assert (traffic.calls("sparse_allreduce") > 0) == sparse
        state = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        found[sparse] = state, engine.get_global_grad_norm()
        engine.destroy()
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-4)
    assert_close_named(found[True][0], found[False][0], rtol=1e-5, atol=1e-7)


def test_a_sparse_embedding_trains_as_a_dense_one(tmp_path):
    run_ranks(train, 2, str(tmp_path), timeout=100)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_divide_gradients_refuse_it(stage):
    with pytest.raises(DsxConfigError, match=r"sparse_gradients.*divides dense gradients"):
        dsx.initialize(model=Net(True), config=config(sparse_gradients=True, zero_optimization={"stage": stage}))
