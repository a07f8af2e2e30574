"""The same training as a function of Ray Train, which starts the workers and starts all of them again after a failure.

    python ray_train.py /shared/elastic

Ray sets up torch.distributed in its workers before the function is called, so that the number of workers is fixed for
an attempt and `elasticity.join` finds it in the environment; choose a number that shares the batch out
(`dsx elastic --config dsx.json`).
"""

import sys

from train import main as train


def loop(config: dict) -> None:
    """What each worker runs."""
    train(["--out", config["out"], "--steps", str(config["steps"])])


def run(out: str, workers: int = 2, steps: int = 50):
    """Start the workers and wait for them."""
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"out": out, "steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=-1)),
    )
    return trainer.fit()


if __name__ == "__main__":
    run(sys.argv[1])
