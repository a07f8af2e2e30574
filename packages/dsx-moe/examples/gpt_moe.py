"""Train a byte-level GPT with experts on Python's own library, on one process or many, without an engine.

    python gpt_moe.py --num-experts 8 --topk 2
    torchrun --nproc-per-node 4 gpt_moe.py --num-experts 8 --moe-expert-parallel-size 4 --picture load.svg

The flags are those of DeepSpeed's tutorial for language models. Every second layer has experts. `--num-experts` takes
one number for all of these layers, or one number for each (a pyramid); `--num-experts 1` is a dense model. The training
loss and the held-out loss are printed in bits per byte.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import dsx_comm
import torch
import torch.nn.functional as F
from dsx_moe import MoE, average_gradients, broadcast_parameters, clip_grad_norm_, name_layers
from dsx_moe.watching import LoadHistory, layer_stats
from torch import nn


class FeedForward(nn.Module):
    """A feed-forward layer with inner size 4 h. It is the dense layer, and each expert."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] to [..., h]."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then a feed-forward layer or experts; each adds its output to the residual stream."""

    def __init__(self, args: argparse.Namespace, experts: int) -> None:
        super().__init__()
        width = args.hidden_size
        self.heads = args.num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if experts == 1:
            self.feed: nn.Module = FeedForward(width)
        else:
            self.feed = MoE(
                width,
                lambda number: FeedForward(width),
                experts,
                ep_size=min(args.moe_expert_parallel_size, experts),
                k=args.topk,
                capacity_factor=args.moe_train_capacity_factor,
                eval_capacity_factor=args.moe_eval_capacity_factor,
                min_capacity=args.moe_min_capacity,
                drop_tokens=not args.disable_moe_token_dropping,
                use_residual=args.mlp_type == "residual",
                overlap_chunks=args.overlap_chunks,
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, length, h] to the same, and the balancing loss (0 for a dense layer)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed = self.feed(self.norm2(x))
        if isinstance(fed, tuple):
            return x + fed[0], fed[1]
        return x + fed, x.new_zeros(())


class GPT(nn.Module):
    """`model(tokens)` gives logits [batch, length, 256] and the sum of the balancing losses."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, args.hidden_size)
        self.positions = nn.Embedding(args.seq_length, args.hidden_size)
        self.blocks = nn.ModuleList(Block(args, experts) for experts in experts_per_layer(args))
        self.norm, self.head = nn.LayerNorm(args.hidden_size), nn.Linear(args.hidden_size, 256, bias=False)
        name_layers(self)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`tokens` is int64 [batch, length]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        balance = x.new_zeros(())
        for block in self.blocks:
            x, l_aux = block(x)
            balance = balance + l_aux
        return self.head(self.norm(x)), balance


def experts_per_layer(args: argparse.Namespace) -> list[int]:
    """Number of experts of each layer; 1 for a dense layer. Every second layer has experts."""
    layers = list(range(1, args.num_layers, 2))
    counts = args.num_experts * len(layers) if len(args.num_experts) == 1 else args.num_experts
    if len(counts) != len(layers):
        raise SystemExit(f"--num-experts: got {len(counts)} numbers, expected 1 or {len(layers)} (layers of experts)")
    return [counts[layers.index(i)] if i in layers else 1 for i in range(args.num_layers)]


def load_text(data: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes of a file, or of Python's library; every tenth file (or piece) is held out."""
    if data is None:
        pieces = [f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    else:
        text = data.read_bytes()
        size = max(len(text) // 100, 1)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [b"".join(p for i, p in enumerate(pieces) if (i % 10 == 9) is held) for held in (False, True)]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def windows(text: torch.Tensor, args: argparse.Namespace, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of inputs and targets [batch, length], drawn with a seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - args.seq_length - 1, (args.micro_batch_size,), generator=generator)
    both = torch.stack([text[s : s + args.seq_length + 1] for s in starts.tolist()]).long()
    return both[:, :-1], both[:, 1:]


def bits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in bits per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / math.log(2)


@torch.no_grad()
def held_out_bits(model: nn.Module, text: torch.Tensor, args: argparse.Namespace, batches: int = 16) -> float:
    """Held-out loss in bits per byte. The batches are the same for every model.

    Every rank must call this, because every rank holds experts.
    """
    model.eval()
    found = [bits(model(x)[0], y).item() for x, y in (windows(text, args, 10**6 + i) for i in range(batches))]
    model.train()
    return sum(found) / len(found)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A warm-up of 50 steps, then a linear decay to a tenth."""
    return args.lr * min((step + 1) / 50, 1.0) * (1 - 0.9 * step / max(args.train_iters, 1))


def train(model: nn.Module, args: argparse.Namespace, history: LoadHistory | None = None, loss_of=None) -> list[float]:
    """Train, and return the held-out losses: one every `--eval-interval` steps and one at the end.

    Args:
        loss_of: (step, logits, targets, inputs) -> loss in bits; None: the cross entropy.
    """
    text, held_out = load_text(args.data)
    rank, world = dsx_comm.get_rank(), dsx_comm.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    curve, began = [], time.perf_counter()
    for step in range(args.train_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        inputs, targets = windows(text, args, args.seed * 10**7 + step * world + rank)
        logits, balance = model(inputs)
        loss = bits(logits, targets) if loss_of is None else loss_of(step, logits, targets, inputs)
        (loss + args.moe_loss_coeff * balance).backward()
        average_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if history is not None:
            history.record(model, step)
        if (step + 1) % args.eval_interval == 0 or step + 1 == args.train_iters:
            curve.append(held_out_bits(model, held_out, args))
            if rank == 0 and not args.quiet:
                dropped = [f"{stats.dropped_share:.1%}" for stats in layer_stats(model).values()]
                spent = time.perf_counter() - began
                print(
                    f"step {step + 1:5d}  train {loss.item():.3f}  held out {curve[-1]:.3f} bits per byte  "
                    f"dropped {' '.join(dropped) or '-'}  {spent:.0f} s",
                    flush=True,
                )
    return curve


def build(args: argparse.Namespace) -> GPT:
    """The model, initialised from its seed and equal on all ranks."""
    torch.manual_seed(args.seed)
    model = GPT(args)
    broadcast_parameters(model)
    return model


def parser() -> argparse.ArgumentParser:
    """The flags of the tutorial. With the default sizes a laptop trains the model in minutes."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--num-layers", type=int, default=4)
    made.add_argument("--hidden-size", type=int, default=128)
    made.add_argument("--num-attention-heads", type=int, default=4)
    made.add_argument("--seq-length", type=int, default=128)
    made.add_argument("--micro-batch-size", type=int, default=16)
    made.add_argument("--train-iters", type=int, default=500)
    made.add_argument("--eval-interval", type=int, default=50)
    made.add_argument("--lr", type=float, default=2e-3)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--data", type=Path, help="a text file; default: Python's library")
    made.add_argument("--num-experts", type=int, nargs="+", default=[8], help="one number, or one per layer of experts")
    made.add_argument("--topk", type=int, default=1, help="experts per token")
    made.add_argument("--moe-expert-parallel-size", type=int, default=1)
    made.add_argument("--moe-loss-coeff", type=float, default=0.01)
    made.add_argument("--moe-train-capacity-factor", type=float, default=1.0)
    made.add_argument("--moe-eval-capacity-factor", type=float, default=1.0)
    made.add_argument("--moe-min-capacity", type=int, default=4)
    made.add_argument("--disable-moe-token-dropping", action="store_true")
    made.add_argument("--mlp-type", choices=("standard", "residual"), default="standard")
    made.add_argument("--overlap-chunks", type=int, default=1)
    made.add_argument("--picture", type=Path, help="write the load of experts over time as SVG")
    made.add_argument("--quiet", action="store_true")
    return made


def main() -> None:
    """Train the model that the flags describe."""
    args = parser().parse_args()
    dsx_comm.init_distributed()
    model = build(args)
    history = LoadHistory() if args.picture else None
    if dsx_comm.get_rank() == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters on this rank", flush=True)
    train(model, args, history)
    if history is not None and dsx_comm.get_rank() == 0:
        history.write_svg(args.picture)


if __name__ == "__main__":
    main()
