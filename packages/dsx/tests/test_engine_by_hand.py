"""Calls of loops that do by hand what the engine does by itself, under DeepSpeed's names, against plain PyTorch."""

import pytest
import torch
from dsx_testkit import run_ranks


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def build(stage, **more):
    import dsx

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        **more,
    }
    return dsx.initialize(model=model(), config=settings)[0]


def batch(rank, step):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_updates(world, parts, updates):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for update in range(updates):
        for rank in range(world):
            for part in range(parts):
                (net(batch(rank, update * parts + part)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


def close(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    return True


def coalesced(rank, world, stage):
    engine = build(stage)
    for update in range(2):
        with engine.coalesce_grad_reduction():
            for part in range(3):
                engine.backward(engine(batch(rank, update * 3 + part)).square().mean())
        engine.step()
    return close(engine.module_state_dict(), plain_updates(world, 3, 2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_coalesced_backwards_are_reduced_once_and_add_up(stage):
    assert run_ranks(coalesced, 2, stage) == [True, True]


def reduced_early(rank, world, stage):
    from dsx.utils import safe_get_full_grad

    engine = build(stage, gradient_accumulation_steps=2)
    engine.backward(engine(batch(rank, 0)).square().mean())
    engine.step()
    engine.allreduce_gradients()
    net = model()
    for other in range(world):
        (net(batch(other, 0)).square().mean() / world / 2).backward()
    seen = safe_get_full_grad(next(iter(engine.module.parameters())))
    torch.testing.assert_close(seen, next(iter(net.parameters())).grad, rtol=1e-5, atol=1e-6)
    engine.backward(engine(batch(rank, 1)).square().mean())
    engine.step()
    for other in range(world):
        (net(batch(other, 1)).square().mean() / world / 2).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return close(engine.module_state_dict(), {name: value.detach() for name, value in net.state_dict().items()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_reduced_early_are_the_mean_and_are_not_reduced_twice(stage):
    assert run_ranks(reduced_early, 2, stage) == [True, True]


def emptied(rank, world):
    engine = build(3)
    for update in range(2):
        engine.module(batch(rank, update))
        engine.empty_partition_cache()
        engine.backward(engine(batch(rank, update)).square().mean())
        engine.empty_partition_cache()
        engine.step()
    with torch.no_grad():
        engine(batch(rank, 5))
    engine.empty_partition_cache()
    return close(engine.module_state_dict(), plain_updates(world, 1, 2))


def test_freeing_what_is_gathered_changes_no_result():
    assert run_ranks(emptied, 2) == [True, True]


def loaded(rank, world, stage, custom):
    engine = build(stage, bf16={"enabled": True})
    other = {name: value + 1 for name, value in model().to(torch.bfloat16).state_dict().items()}

    def copy(src, dst):
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name])

    engine.load_module_state_dict(other, custom_load_fn=copy if custom else None, fetch_z3_params=custom)
    close(engine.module_state_dict(), other)
    engine.backward(engine(batch(rank, 0).bfloat16()).float().sum() * 0)
    engine.step()  # a step of nothing: the masters have the loaded values
    return close(engine.module_state_dict(), other)


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_loaded_by_hand_reach_the_masters(stage, custom):
    assert run_ranks(loaded, 2, stage, custom) == [True, True]


def test_names_of_the_optimizer_and_of_the_types():
    engine = build(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert engine.optimizer.optimizer is engine.optimizer.inner
    assert engine.optimizer.cur_scale == engine.loss_scale() == 1.0 and not engine.optimizer.dynamic_loss_scale
    assert engine.config.precision.dtype("grad_accum") == torch.float32
    assert engine.get_data_parallel_rank() == 0 and not engine.is_compiled
    engine.module[0].compile(backend="eager")
    assert engine.is_compiled


def test_what_cannot_be_done_says_so():
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        build(0).allreduce_gradients(bucket_size=100)
    with pytest.raises(RuntimeError, match="Missing key"):
        build(0).load_module_state_dict({"other": torch.zeros(1)})
