"""A plan that is made in a process that trains: what other threads do meanwhile is done as ever."""

import logging
import threading

import dsx
import dsx_ops
import torch
from torch import nn


def one_update(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Probe(nn.Module):
    """Runs `beside` in a thread of its own in each forward."""

    def __init__(self, beside):
        super().__init__()
        self.layer, self.beside = nn.Linear(300, 300), beside

    def forward(self, x):
        thread = threading.Thread(target=self.beside)
        thread.start()
        thread.join()
        return self.layer(x).square().mean()


def test_an_optimizer_in_another_thread_steps_and_logs_while_a_plan_is_made(caplog):
    torch.manual_seed(0)
    start = torch.randn(50, 50)
    planned, alone = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [dsx_ops.FusedAdam([parameter], lr=0.1) for parameter in (planned, alone)]
    updates = []

    def beside():
        one_update(optimizers[0])
        logging.getLogger("dsx_ops").warning("update %d", len(updates))
        updates.append(planned.detach().clone())

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    with caplog.at_level("WARNING"):
        dsx.plan(Probe(beside), config, world_size=2, batch=torch.zeros(2, 300))
    assert updates, "the plan ran no forward"
    for number, got in enumerate(updates):
        one_update(optimizers[1])
        torch.testing.assert_close(got, alone, msg=f"update {number}")
    assert [record.getMessage() for record in caplog.records if record.name == "dsx_ops"] == [
        f"update {number}" for number in range(len(updates))
    ]
    one_update(optimizers[0])
    one_update(optimizers[1])
    torch.testing.assert_close(planned, alone)
