"""Lightning's Trainer and Fabric with their DeepSpeed strategies: a curve as plain PyTorch's, and a resume.

Both strategies insist on CUDA; the subclasses let them run on CPU devices and change nothing else.
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from common import STEPS, WORLD, close, data, model, plain_curve, report
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

MICRO, HALF = 2, STEPS // 2


class OnCPU(DeepSpeedStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


class FabricOnCPU(FabricDeepSpeed):
    def setup_environment(self):
        FabricDDP.setup_environment(self)

    def _setup_distributed(self):
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.curve = model(), []

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.curve.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


def means(losses) -> list[float]:
    mine = torch.stack(losses)
    both = [torch.empty_like(mine) for _ in range(WORLD)]
    torch.distributed.all_gather(both, mine)
    return (sum(both) / WORLD).tolist()


def loader(first=0, last=STEPS):
    """The batches of the updates `first` to `last`, as one epoch."""
    per_update = MICRO * WORLD
    rows = torch.utils.data.Subset(data(STEPS * per_update), range(first * per_update, last * per_update))
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=WORLD, rank=int(os.environ["RANK"]), shuffle=False)
    return torch.utils.data.DataLoader(rows, batch_size=MICRO, sampler=sampler)


def config(stage):
    return {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "allgather_partitions": True, "overlap_comm": True},
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
    }


def fit(stage, folder, expected):
    def trainer(epochs):
        return lightning.Trainer(
            accelerator="cpu", devices=WORLD, strategy=OnCPU(config=config(stage)), max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=stage == 3,
            use_distributed_sampler=False,
            precision="32-true",
        )  # fmt: skip

    first = Module()
    one = trainer(1)
    one.fit(first, loader(0, HALF))
    close(means(first.curve), expected[:HALF], "first half")
    one.save_checkpoint(folder)
    second = Module()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)  # a resume that loaded nothing would show
    # An epoch has ended: inside of one Lightning does not go on with the batch that comes next.
    trainer(2).fit(second, loader(HALF, STEPS), ckpt_path=folder)
    return means(first.curve) + means(second.curve)


def fabric_loop(stage, folder, expected):
    def prepare(shift):
        fabric = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy=FabricOnCPU(config=config(stage)))
        fabric.launch()
        with fabric.init_module():
            net = model()
        if shift:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.data.add_(1.0)
        return (fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01)))

    def train(fabric, net, optimizer, first, last):
        losses = []
        for number, (x, y) in enumerate(loader()):
            if first <= number < last:
                loss = torch.nn.functional.mse_loss(net(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return means(losses)

    parts = prepare(False)
    curve = train(*parts, 0, HALF)
    state = {"model": parts[1], "optimizer": parts[2], "note": 7}
    parts[0].save(folder, state)
    close(train(*parts, HALF, STEPS), expected[HALF:], "unbroken")
    parts = prepare(True)
    state = {"model": parts[1], "optimizer": parts[2], "note": 0}
    parts[0].load(folder, state)
    assert state["note"] == 7
    return curve + train(*parts, HALF, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--folder")
    parser.add_argument("--fabric", action="store_true")
    args = parser.parse_args()
    expected = plain_curve(STEPS, micro=MICRO)
    curve = (fabric_loop if args.fabric else fit)(args.stage, args.folder, expected)
    close(curve, expected, "resumed")
    report(curve=curve)


main()
