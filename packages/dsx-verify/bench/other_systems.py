"""Audits the real loops and engines of other projects on two CPU ranks: right programs, and wrong ones.

    python packages/dsx-verify/bench/other_systems.py [--only NAME] [--environment DIR] [--deepspeed 0.19.8]

The projects are installed into a virtual environment of their own (default `.venvs/verify-systems`), which finds torch
and the workspace's packages in the environment of the running Python; nothing is installed there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsx_verify import Expected, Receipt, audit, audit_loop

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = (
    "setuptools>=77",
    "wheel",
    "accelerate==1.15.0",
    "lightning==2.6.6",
    "lightning-utilities",
    "torchmetrics",
    "psutil",
)
TITAN = ("torchtitan==0.3.0", "torch_checkpointing", "spmd_types==0.2.3", "torchdata", "tyro", "typeguard",
         "docstring_parser")  # fmt: skip
TITAN_NEEDS = ("datasets<4.8", "tokenizers", "safetensors", "pillow", "tensorboard", "rich")
"""These bring packages of their own, none of which needs torch."""
ENGINE_NEEDS = ("hjson", "msgpack", "py-cpuinfo", "einops", "nvidia-ml-py", "ninja", "pydantic")
ACCUMULATION, CLIP = 3, 0.1


class Small(torch.nn.Module):
    """Two layers with dropout; the forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.drop, self.b = torch.nn.Linear(6, 10), torch.nn.Dropout(0.2), torch.nn.Linear(10, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error."""
        return torch.nn.functional.mse_loss(self.b(self.drop(torch.tanh(self.a(x)))), y)


def pairs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch `number`."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 6, generator=generator), torch.randn(2, 3, generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW without decay."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def transformers_train(wrong: bool) -> Receipt:
    """`Trainer.train()` of a GPT-2 with labels of other lengths, a schedule and clipping. Wrong: an overridden
    `compute_loss` that forgets the number of tokens.
    """
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        get_linear_schedule_with_warmup,
    )

    def make() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2))

    def item(number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 31, (12,), generator=torch.Generator().manual_seed(number))
        labels = tokens.clone()
        labels[: number % 7 + 1] = -100
        return {"input_ids": tokens, "labels": labels}

    class Forgetful(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **more: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=ACCUMULATION,
        max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-2, warmup_steps=2,
        save_strategy="no", logging_strategy="no", max_grad_norm=0.5,
    )  # fmt: skip
    data: Any = [item(number) for number in range(64)]
    trainer = (Forgetful if wrong else Trainer)(model=make(), args=arguments, train_dataset=data)
    expected = Expected(
        make,
        adamw,
        loss=lambda model, inputs: model(**inputs).loss,
        weight=lambda inputs: float((inputs["labels"][:, 1:] != -100).sum()),
        accumulation=ACCUMULATION,
        max_norm=0.5,
        schedule=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 4),
        same_start=True,
    )
    return audit_loop(trainer.train, trainer, expected=expected, raise_error=False)


def lightning_fit(wrong: bool) -> Receipt:
    """`fit()` under DDP with accumulation and clipping. Wrong: a `training_step` that divides by the accumulation,
    which Lightning has done already.
    """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, divided: bool = False) -> None:
            super().__init__()
            self.net, self.divided = Small(), divided

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(*batch) / (ACCUMULATION if self.divided else 1)

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

    xs, ys = zip(*(pairs(number) for number in range(32)))
    data = torch.utils.data.TensorDataset(torch.cat(xs), torch.cat(ys))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_steps=4, logger=False,
        accumulate_grad_batches=ACCUMULATION, gradient_clip_val=CLIP, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module(wrong)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    expected = Expected(
        Module,
        adamw,
        loss=lambda model, batch: model.training_step(batch, 0),
        accumulation=ACCUMULATION,
        max_norm=CLIP,
    )
    return audit_loop(lambda: trainer.fit(module, loader), module, expected=expected, raise_error=False)


def accelerate_loop(wrong: bool) -> Receipt:
    """A loop with `prepare`, `accumulate` and `clip_grad_norm_`. Wrong: the loss is divided by hand, too."""
    import accelerate

    helper = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    plain = Small()
    model, optimizer = helper.prepare(plain, adamw(plain.parameters()))

    def step(micro_batches: list[Any]) -> list[float]:
        losses = []
        for batch in micro_batches:
            with helper.accumulate(model):
                loss = model(*batch)
                helper.backward(loss / (ACCUMULATION if wrong else 1))
                if helper.sync_gradients:
                    helper.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = Expected(Small, adamw, accumulation=ACCUMULATION, max_norm=CLIP)
    return audit(step, model, expected=expected, batches=pairs, optimizer=optimizer, raise_error=False)


def deepspeed_engine(stage: int) -> Callable[[bool], Receipt]:
    """An engine at a ZeRO stage. Wrong: the loss is divided by hand, too."""

    def run(wrong: bool) -> Receipt:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        model = Small()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config, dist_init_required=False
        )

        def step(micro_batches: list[Any]) -> list[float]:
            losses = []
            for batch in micro_batches:
                loss = engine(*batch)
                engine.backward(loss / (ACCUMULATION if wrong else 1))
                engine.step()
                losses.append(float(loss.detach()))
            return losses

        expected = Expected(Small, adamw, accumulation=ACCUMULATION, max_norm=CLIP)
        return audit(step, engine, expected=expected, batches=pairs, raise_error=False)

    return run


def torchtitan_train(wrong: bool) -> Receipt:
    """`train()` of torchtitan's Trainer. Wrong: each micro-batch is divided by its own tokens."""
    from _torchtitan import audited

    return audited(wrong)


SIMULATED = "torchtitan train(), simulated CUDA"
PROGRAMS: dict[str, Callable[[bool], Receipt]] = {
    "transformers Trainer.train()": transformers_train,
    "Lightning fit()": lightning_fit,
    "Accelerate": accelerate_loop,
    **{f"DeepSpeed stage {stage}": deepspeed_engine(stage) for stage in range(4)},
    SIMULATED: torchtitan_train,
}
"""Audits by name: (whether the program has its mistake) -> the receipt."""


def environment(folder: Path, deepspeed: str) -> Path:
    """The interpreter of the environment with the projects, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True).create(folder)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    here = [
        sysconfig.get_path("purelib"),
        *(str(path) for path in ROOT.glob("packages/*/src") if "compat" not in str(path)),
    ]
    Path(own, "workspace.pth").write_text("\n".join(here) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *CLIENTS, *ENGINE_NEEDS, *TITAN], check=True)
    subprocess.run([*(word for word in pip if word != "--no-deps"), *TITAN_NEEDS], check=True)
    build = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "--no-build-isolation", f"deepspeed=={deepspeed}"], check=True, env=build)
    return python


def main() -> int:
    """Audit all programs in their environment; print what is not as it should be, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venvs" / "verify-systems")
    parser.add_argument("--deepspeed", default="0.19.8", help="version of DeepSpeed")
    parser.add_argument("--wrong", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options, _ = parser.parse_known_args()
    if options.program:
        return _one(options.program, options.wrong)
    from dsx_testkit.results import Table, add_json_option  # lazy import: the environment of a program has no test kit

    add_json_option(parser)
    options = parser.parse_args()
    python, rows, failed = environment(options.environment, options.deepspeed), [], 0
    for name in (name for name in PROGRAMS if options.only in name):
        told = [_audited(python, name, wrong) for wrong in (False, True)]
        rows.append((name, *told))
        failed += told[0] != "clean" or told[1] in ("clean", "no receipt")
        print(f"{name:32} right: {told[0]}; wrong: {told[1]}", flush=True)
    if options.json:
        from dsx_testkit.results import Table

        table = Table({"system": "", "right program": "", "with a mistake": ""})
        for row in rows:
            table.add(*row)
        table.save(options.json)
    return 1 if failed else 0


def _one(name: str, wrong: bool) -> int:
    """One rank of one audit."""
    if name != SIMULATED:  # that program makes its process group itself
        dist.init_process_group("gloo")
    receipt = PROGRAMS[name](wrong)
    if dist.get_rank() == 0:
        verdict = "clean" if receipt.fault is None else receipt.fault.kind
        print(f"{receipt}\nRECEIPT {verdict}", flush=True)
    os._exit(0)  # some projects leave threads and groups behind


def _audited(python: Path, name: str, wrong: bool) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    if name == SIMULATED:
        words += ["--no-python", str(python), "-m", "dsx_simcuda", "--devices", "2"]
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
    words += [__file__, "--program", name]
    done = subprocess.run(
        [python, *words, *(["--wrong"] if wrong else [])], capture_output=True, text=True, env=env, timeout=600
    )
    verdicts = [line[8:] for line in done.stdout.splitlines() if line.startswith("RECEIPT ")]
    if not verdicts or (verdicts[0] != "clean") != wrong:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    return verdicts[0] if verdicts else "no receipt"


if __name__ == "__main__":
    sys.exit(main())
