"""An engine on a CUDA device: steps, offload, checkpoints, experts and a pipeline, against plain PyTorch there."""

import dsx
import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDTH, SCALE = 32, 256.0
ADAM = {"lr": 1e-2, "weight_decay": 0.01}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOST = {"device": "cpu", "pin_memory": True}


@pytest.fixture(autouse=True)
def group(tmp_path):
    """A process group of this process alone."""
    torch.cuda.set_device(0)
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def config(stage, dtype="fp32", **zero):
    half = {"fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}}, "bf16": {"bf16": {"enabled": True}}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,  # the default clips
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **half.get(dtype, {}),
    }


def batch(step, dtype="fp32"):
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return values.to("cuda", DTYPES[dtype])


def run(engine, steps, dtype="fp32"):
    """The losses, read at the end, so that no read makes the host wait in between."""
    losses = []
    for step in steps:
        loss = engine(batch(step, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def plain(steps, dtype="fp32"):
    """PyTorch alone: parameters of the dtype, AdamW on copies in fp32."""
    model = Net().cuda().to(DTYPES[dtype])
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer, losses = torch.optim.AdamW(masters, **ADAM), []
    scale = SCALE if dtype == "fp16" else 1.0
    for step in steps:
        loss = model(batch(step, dtype))
        (loss * scale).backward()
        for master, parameter in zip(masters, model.parameters()):
            master.grad, parameter.grad = parameter.grad.float() / scale, None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


CASES = [
    *((stage, dtype, {}) for stage in range(4) for dtype in DTYPES),
    (2, "fp32", {"offload_optimizer": HOST}),
    (2, "bf16", {"offload_optimizer": HOST}),
    (3, "fp32", {"offload_optimizer": HOST, "offload_param": HOST}),
    (3, "bf16", {"offload_optimizer": HOST, "offload_param": {"device": "cpu"}}),
]


@pytest.mark.parametrize(("stage", "dtype", "zero"), CASES)
def test_an_engine_trains_like_plain_pytorch(stage, dtype, zero):
    engine = dsx.initialize(model=Net(), config=config(stage, dtype, **zero))[0]
    found = run(engine, range(5), dtype)
    engine.destroy()
    assert found == pytest.approx(plain(range(5), dtype), rel=2e-5 if dtype == "fp32" else 4e-3)


def test_parameters_and_optimizer_on_disk(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"offload_optimizer": disk, "offload_param": {**disk, "max_in_cpu": 0, "pin_memory": True}}
    engine = dsx.initialize(model=Net(), config=config(3, **zero))[0]
    found = run(engine, range(4))
    engine.destroy()
    assert found == pytest.approx(plain(range(4)), rel=2e-5)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_the_values_of_its_step(stage, asynchronous, tmp_path):
    """Training goes on at once behind the saving: the copies to the host may not see the next step."""
    settings = {**config(stage), "checkpoint": {"asynchronous": asynchronous}}
    engine = dsx.initialize(model=Net(), config=settings)[0]
    run(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "saved"))
    went_on = run(engine, range(2, 5))
    engine.destroy()
    other = dsx.initialize(model=Net(), config=settings)[0]
    other.load_checkpoint(str(tmp_path / "saved"))
    assert run(other, range(2, 5)) == pytest.approx(went_on, rel=1e-6)
    other.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_train_as_on_the_cpu(stage):
    dsx_moe = pytest.importorskip("dsx_moe")

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.moe = dsx_moe.MoE(
                WIDTH, lambda i: nn.Linear(WIDTH, WIDTH), 4, 1, k=2, drop_tokens=False, top2_2nd_expert_sampling=False
            )

        def forward(self, x):
            out, l_aux, _ = self.moe(self.first(x))
            return out.square().mean() + 0.1 * l_aux

    engine = dsx.initialize(model=Experts(), config=config(stage))[0]
    found = run(engine, range(4))
    engine.destroy()
    model = Experts().cuda()
    optimizer, wanted = torch.optim.AdamW(model.parameters(), **ADAM), []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_pipeline_of_one_stage_trains_like_its_layers():
    dsx_pipe = pytest.importorskip("dsx_pipe")

    def layers():
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]

    def loss_of(out, target):
        return (out - target).square().mean()

    module = dsx_pipe.PipelineModule(layers(), num_stages=1, loss_fn=loss_of, partition_method="uniform")
    engine = dsx.initialize(model=module, config={**config(1), "gradient_accumulation_steps": 2})[0]
    pairs = [(batch(2 * step), batch(2 * step + 1)) for step in range(6)]
    found = [float(engine.train_batch(iter(pairs[2 * update : 2 * update + 2]))) for update in range(3)]
    model = nn.Sequential(*layers()).cuda()
    optimizer, wanted = torch.optim.AdamW(model.parameters(), **ADAM), []
    for update in range(3):
        optimizer.zero_grad()
        losses = [loss_of(model(x), y) / 2 for x, y in pairs[2 * update : 2 * update + 2]]
        sum(losses).backward()
        optimizer.step()
        wanted.append(sum(losses).item())
    assert found == pytest.approx(wanted, rel=1e-4)
