"""Reinforcement learning in the manner of GRPO: a policy generates, is rewarded, and learns; between the phases its
training states leave the device.

    dsx launch --num_procs 2 grpo.py --rounds 30

Shows: sleep and wake (`offload_states`, `reload_states`), whole weights in buckets for a generator, changes since the
last push, log-probabilities of a reference model. The task: write sequences whose tokens sum to a multiple of 7. The
generator is a plain copy of the model; vLLM and SGLang take the same (name, tensor) pairs.
"""

import argparse
import copy

import dsx
import torch
from torch import nn

WORDS, LENGTH, GROUP = 10, 6, 16


class Policy(nn.Module):
    """Reads a sequence token by token and scores the next one."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, width)
        self.blocks = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        return torch.log_softmax(self.head(x), -1)


class Generator:
    """A whole copy of the model that only generates."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.random = model, torch.Generator().manual_seed(seed)
        self.weights = dict(model.named_parameters())

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, value in weights:
            self.weights[name].copy_(value)

    @torch.no_grad()
    def generate(self, count: int) -> torch.Tensor:
        tokens = torch.full((count, 1), WORDS)  # the begin
        for _ in range(LENGTH):
            odds = self.model(tokens)[:, -1].exp()
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=self.random)], 1)
        return tokens


def log_probs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[sequences, LENGTH]: of each token that was generated."""
    return model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3)
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    policy, config = Policy(), {
        "train_micro_batch_size_per_gpu": 4 * GROUP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": options.stage},
    }  # fmt: skip
    plain, reference = copy.deepcopy(policy), copy.deepcopy(policy).eval()
    engine, *_ = dsx.initialize(model=policy, config=config)
    generator = Generator(plain, seed=1 + engine.global_rank)
    mark = engine.weights.mark()
    engine.offload_states()  # the generator has the device to itself
    for round_ in range(options.rounds):
        changed = mark.pack().numel()  # what a push of changes alone would send
        for bucket in engine.weights.buckets(bucket_bytes=1 << 16):
            generator.load_weights(bucket.items())
        tokens = generator.generate(4 * GROUP)
        reward = (tokens[:, 1:].sum(1) % 7 == 0).float()

        engine.reload_states(include=["lp_params"])  # enough for log-probabilities
        with torch.no_grad():
            old, base = log_probs(engine, tokens), log_probs(reference, tokens)
        engine.reload_states()
        groups = reward.view(-1, GROUP)
        gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)).view(-1, 1)
        new = log_probs(engine, tokens)
        ratio = (new - old).exp()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + 0.01 * (new - base).square().mean()
        engine.backward(loss)
        engine.step()
        engine.offload_states()
        if engine.global_rank == 0 and round_ % 10 == 0:
            away = ", ".join(kind.value for kind in engine.optimizer.moved.away)
            print(f"round {round_}: reward {reward.mean():.2f}, {changed} bytes changed, in host memory: {away}")
    engine.save_checkpoint("runs/grpo")  # asleep
    if engine.global_rank == 0:
        print(f"reward {reward.mean():.2f} in the last round")
    engine.destroy()


if __name__ == "__main__":
    main()
