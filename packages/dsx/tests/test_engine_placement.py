"""`initialize` moves a model to its device unit by unit: the whole of it never lies there beside its shards."""

import pytest
import torch
from dsx_testkit import LabelledDevice, run_ranks

UNITS, WIDTH = 8, 32
UNIT = (WIDTH * WIDTH + WIDTH) * 4


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x + self.shift).square().mean()


def start(model, mode, stage):
    import dsx

    host = {"device": "cpu"}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    if stage == 3:
        zero |= {"offload_param": host, "offload_optimizer": host}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        "steps_per_print": None,
        mode: {"enabled": mode == "bf16"},
    }
    return dsx.initialize(model=model, config=settings)[0]


def initialize(rank, world, mode):
    import dsx.wiring

    with LabelledDevice() as device:
        dsx.wiring.device_of = lambda topology: device.label  # as if this process had a device
        model = Blocks()
        shift = model.shift.data_ptr()
        engine = start(model, mode, 3)
        assert 0 < device.peak <= 2 * UNIT, (device.peak, UNITS * UNIT)
        assert model.shift.data_ptr() != shift  # buffers lie on the device
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        for _ in range(3):
            engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)))
            engine.step()
        assert device.peak <= UNITS * UNIT / 2
    return engine.get_global_grad_norm()


@pytest.mark.parametrize("mode", ["bf16", "fp16"])  # fp16 off: fp32
def test_a_model_larger_than_the_device_never_lies_on_it_whole(mode):
    one, two = run_ranks(initialize, 1, mode), run_ranks(initialize, 2, mode)
    assert one[0] == pytest.approx(two[0], rel=1e-2) and two[0] == two[1] > 0


def built_in_parts(rank, world):
    """Parameters that `zero.Init` has divided already are left as they are."""
    import dsx
    import dsx.wiring

    with dsx.zero.Init():
        model = Blocks()
    with LabelledDevice() as device:
        dsx.wiring.device_of = lambda topology: device.label
        engine = start(model, "fp16", 3)
        assert 0 < device.peak <= UNITS * UNIT + 2 * UNIT  # the shards that Init made, and a unit at a time
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    return engine.get_global_grad_norm()


def test_partitioned_parameters_are_moved_as_shards():
    norms = run_ranks(built_in_parts, 2)
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize("stage", [0, 2])
def test_recurrent_layers_follow(stage):
    def work(rank, world):
        import dsx.wiring

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.cells = torch.nn.LSTM(4, 4, batch_first=True)

            def forward(self, x):
                return self.cells(x)[0].square().mean()

        with LabelledDevice() as device:
            dsx.wiring.device_of = lambda topology: device.label
            engine = start(Net(), "fp16", stage)
            losses = []
            for _ in range(3):
                loss = engine(torch.ones(2, 3, 4))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            assert losses[2] < losses[0]

    run_ranks(work, 2)
