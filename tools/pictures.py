"""The pictures of the documentation that the planner makes: `python tools/pictures.py` writes them into docs/assets.

They are drawn from plans, not by hand, so that they show what the engine does. `--check` writes nothing and fails
where a picture is not what the planner says now. `--record 03-zero-3` follows a lesson of the course and keeps what its
plan and its run draw: times of a run cannot be checked, its bytes and lanes are (tests/docs/test_course.py). Each
picture has both palettes; the reader's system chooses.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import page_pictures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ASSETS = DOCS / "assets"


def gpt_blocks() -> Any:
    """A model of six blocks with the sizes of a small transformer's matrices."""
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

    return nn.Sequential(*(block() for _ in range(6)))


def stage_3_step() -> str:
    """One step at stage 3 on eight GPUs: gathers run ahead of the computation, reductions follow it."""
    import torch
    from dsx.planning import plan
    from dsx_plan.page import plan_picture

    config = {
        "train_micro_batch_size_per_gpu": 4096,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    found = plan(gpt_blocks, config, world_size=8, machine="H100-SXM", batch=torch.zeros(4096, 2048))
    return plan_picture(found, "A planned step at stage 3: six blocks on eight H100")


def long_sequences() -> str:
    """Memory over the length of a sequence, by the settings that divide it or move it to the host."""
    import dsx_activations
    import torch
    from dsx.planning import longest
    from dsx_plan.reaching import memory_picture
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(2048, 3072, bias=False), nn.Linear(2048, 2048)
            self.mlp = nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.qkv(x).split([2048, 512, 512], -1)
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + dsx_activations.run_in_tiles(self.mlp, x, tiles=8)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.recomputes = nn.ModuleList(Block() for _ in range(4)), False

        def gradient_checkpointing_enable(self) -> None:
            self.recomputes = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = dsx_activations.checkpoint(block, x) if self.recomputes else block(x)
            return x[:, ::64].float().square().mean()

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    }
    found = longest(
        Blocks, config, world_size=8, machine="H100-SXM", start=1 << 16,
        batch=lambda length: torch.empty(1, length, 2048, dtype=torch.bfloat16, device="meta"),
    )  # fmt: skip
    return memory_picture(found)


def memory_by_phase() -> str:
    """Memory of the device in the phases of post-training: a small Llama at stage 3 beside a generator on two ranks."""
    import transformers
    from dsx.planning import plan
    from dsx_monitor.picture import Bar, step_picture
    from dsx_plan.phases import Generator

    def llama() -> Any:
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32768, hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
                intermediate_size=5632, use_cache=False,
                attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
            )
        )  # fmt: skip

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 3},
    }
    found = plan(
        llama, config, world_size=8, machine="H100-SXM", sequence=1024, changes=False,
        generator=Generator(tokens=1 << 17, ranks=2),
    )  # fmt: skip
    bars = [Bar(name, found.phases[name]) for name in ("train", "sleep", "push", "generate")]
    return step_picture("Planned memory of a device by phase: 0.5 B parameters, stage 3 on eight H100", bars, [])


PICTURES = {
    "step-stage3.svg": stage_3_step, "long-sequences.svg": long_sequences, "memory-by-phase.svg": memory_by_phase,
    **page_pictures.PICTURES,
}  # fmt: skip


def followed_pages() -> list[Path]:
    """The pages that are followed by copy and paste: the course, and whole jobs from end to end."""
    return [page for part in ("course", "end-to-end") for page in sorted((DOCS / part).glob("*.md"))]


def prepare(page: Path, folder: Path) -> None:
    """What a reader of a page has in the folder: the example programs, and the files of the pages before it."""
    from dsx_testkit.pages import save_files

    for package in ("dsx", "dsx-activations"):
        for file in sorted((ROOT / "packages" / package / "examples").glob("*.*")):
            if file.suffix in (".py", ".json"):
                shutil.copy(file, folder)
    save_files([one for one in followed_pages() if one.parent == page.parent and one != page], folder)
    save_files([page], folder)


def planned() -> dict[str, str]:
    """The pictures that the plans of followed pages draw, by name: each plan is run, and nothing else of a page."""
    from dsx_testkit.pages import commands_of

    found = {}
    for page in followed_pages():
        wanted = [shlex.split(line) for line in commands_of(page) if line.startswith("dsx plan ")]
        wanted = [words for words in wanted if words[-1].endswith("-plan.svg")]
        with tempfile.TemporaryDirectory() as folder:
            prepare(page, Path(folder))
            for words in wanted:
                command = [sys.executable, "-m", *words]
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
                found[f"course/{words[-1]}"] = Path(folder, words[-1]).read_text()
    return found


def record(pages: list[str]) -> None:
    """Follow whole pages (names, without .md) and keep the pictures of plans and runs that they make."""
    from dsx_testkit.pages import follow

    chosen = {page.stem: page for page in followed_pages()}
    for name in pages:
        with tempfile.TemporaryDirectory() as folder:
            prepare(chosen[name], Path(folder))
            print(f"{name}:\n", "".join(follow(chosen[name], Path(folder), warm=True)), sep="")
            for end in ("plan", "run"):
                for picture in Path(folder).glob(f"*-{end}.svg"):
                    shutil.copy(picture, ASSETS / "course")


def main() -> int:
    """Write or check all pictures; returns 1 if one is not up to date."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is out of date")
    parser.add_argument(
        "--record", nargs="+", metavar="PAGE", help="follow these lessons, and keep their pictures only"
    )
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return 0
    old = []
    for name, text in {**{name: draw() for name, draw in PICTURES.items()}, **planned()}.items():
        path = ASSETS / name
        if options.check and (not path.is_file() or path.read_text() != text):
            old.append(name)
        elif not options.check:
            path.write_text(text)
    if old:
        print(f"out of date: {', '.join(old)}; run python tools/pictures.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
