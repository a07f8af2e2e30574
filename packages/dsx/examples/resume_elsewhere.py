"""Train on two processes at stage 2, then go on at stage 3 on as many as you like, with the optimizer on the host.

    dsx launch --num_procs 2 resume_elsewhere.py --steps 20
    dsx launch --num_procs 1 resume_elsewhere.py --steps 40 --stage 3 --offload

Shows: a checkpoint that knows nothing of ranks, stages and placement; the position in the data is in it.
"""

import argparse

import dsx
import torch
from gpt import GPT, GPTConfig, Windows, load_text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--out", default="runs/elsewhere")
    options, _ = parser.parse_known_args()

    torch.manual_seed(0)
    zero = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": zero,
    }
    training, _ = load_text(None)
    model = GPT(GPTConfig(layers=2, width=96, heads=4, context=64))
    engine, _, loader, _ = dsx.initialize(model=model, training_data=Windows(training, 64), config=config)
    path, _ = engine.load_checkpoint(options.out)
    start, loss = engine.global_steps, torch.zeros(())
    # The steps are counted first: a batch that the loader has given counts as used.
    for _, (tokens, targets) in zip(range(start, options.steps), loader):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(options.out)
    if engine.global_rank == 0:
        print(f"began at step {start} ({path or 'new'}), ended at {engine.global_steps}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
