"""Arguments of initialize, accessors, sizes that change, saving of whole weights, the end of an engine."""

import argparse
import gc
import weakref
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks, tiny


def config(**changes):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": None,
    }
    return {**base, **changes}


def build(model=None, **arguments):
    import dsx

    arguments.setdefault("config", config())
    return dsx.initialize(model=model or tiny.MLP(6, 8, 4, seed=0), **arguments)[0]


def step(engine, index=0):
    x, y = tiny.MLP(6, 8, 4, seed=0).example(2, seed=index)
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


# - initialize


def test_config_comes_from_one_place():
    args = argparse.Namespace(deepspeed=True, deepspeed_config="missing.json")
    with pytest.raises(ValueError, match=r"missing\.json"):
        build(args=args, config=None)
    with pytest.raises(ValueError, match=r"more than once .config and args.deepspeed_config."):
        build(args=args)
    with pytest.raises(ValueError, match="got no configuration"):
        build(config=None)
    assert build(config=None, config_params=config()).train_batch_size() == 2


def test_config_file_through_the_command_line(tmp_path):
    import json

    path = tmp_path / "dsx.json"
    path.write_text(json.dumps(config()) + "  // a comment")
    args = argparse.Namespace(deepspeed_config=str(path))
    assert build(args=args, config=None).get_lr() == [0.01]


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"model": 3}, "model=.*got int"),
        ({"optimizer": 3}, "optimizer=.*got int"),
        ({"optimizer": lambda params: 3}, "returned int"),
        ({"lr_scheduler": 3}, "lr_scheduler=.*got int"),
        ({"mesh_param": (1, 2)}, "got 2 and mesh_param"),
        ({"model_parameters": []}, "got no parameters, .* leave it out"),
        ({"model_parameters": iter(())}, "got no parameters"),
        ({"model_parameters": [], "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "got no parameters"),
    ],
)
def test_wrong_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        build(**arguments)


def config_error(rank, world):
    import dsx
    import dsx_comm

    with pytest.raises(dsx.DsxConfigError) as caught:
        build(config=config(train_batch_size=7))
    assert not dsx_comm.is_initialized(), "the config is judged before any process group"
    return str(caught.value)


def test_config_errors_come_first_and_are_equal_on_all_ranks():
    texts = run_ranks(config_error, 2, backend=None)
    assert texts[0] == texts[1] and "train_batch_size" in texts[0]


def joins(rank, world):
    import dsx_comm

    engine = build()
    assert dsx_comm.is_initialized() and engine.world_size == world and engine.global_rank == rank
    return step(engine)


def test_initialize_makes_the_process_group_under_a_launcher():
    assert len(run_ranks(joins, 2, backend=None)) == 2


# - Accessors


def sizes(rank, world):
    engine = build(config=config(gradient_accumulation_steps=3, zero_optimization={"stage": 1}))
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6 * world, 2)
    assert engine.gradient_accumulation_steps() == 3 and engine.get_batch_info().gradient_accumulation_steps == 3
    assert (engine.global_rank, engine.world_size, engine.dp_world_size, engine.mp_world_size) == (
        rank,
        world,
        world,
        1,
    )
    assert engine.zero_optimization_stage() == 1 and engine.gradient_clipping() == 1.0 and engine.loss_scale() == 1.0
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    for _ in range(3):
        step(engine)
    assert engine.get_global_grad_norm() > 0 and engine.last_step.loss > 0
    engine.set_train_batch_size(2 * world)
    assert engine.gradient_accumulation_steps() == 1 and engine.is_gradient_accumulation_boundary()
    step(engine)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (2, 8 * world, 4)
    for wrong in (0, 2 * world + 1):
        with pytest.raises(ValueError, match="set_train_batch_size"):
            engine.set_train_batch_size(wrong)
    engine.set_train_batch_size(4 * world)
    step(engine)
    with pytest.raises(RuntimeError, match="after 1 micro-batches"):
        engine.set_train_batch_size(2 * world)
    step(engine)
    engine.set_train_micro_batch_size(5)
    assert engine.train_batch_size() == 10 * world
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_sizes_and_counters(world):
    assert run_ranks(sizes, world) == [True] * world


def test_the_loss_scale_after_an_overflow():
    plain = build()
    assert plain.optimizer.loss_scale == plain.loss_scale() == 1.0 and not plain.optimizer.dynamic_loss_scale
    scaled = build(config=config(fp16={"enabled": True, "initial_scale_power": 4}))
    assert scaled.data_parallel_group is None
    assert scaled.optimizer.loss_scale == scaled.optimizer.cur_scale == 16.0
    loss = scaled(torch.ones(2, 6, dtype=torch.float16)).float().sum() * float("inf")
    scaled.backward(loss)
    scaled.step()  # an overflow; hysteresis keeps the scale once
    assert (
        scaled.optimizer.overflow
        and scaled.optimizer.loss_scale == scaled.loss_scale() == 16.0
        and scaled.optimizer.dynamic_loss_scale
    )


def test_attributes_of_the_module_are_reachable():
    class Net(tiny.MLP):
        def generate(self, n):
            return [n] * n

    engine = build(Net(6, 8, 4))
    assert engine.generate(2) == [2, 2] and engine.module.generate(1) == [1]
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in engine.module.named_parameters()]
    with pytest.raises(AttributeError, match=r"neither the engine nor its module .Net. has an attribute 'nothing'"):
        engine.nothing
    assert "Net" in repr(engine) and "stage 0" in repr(engine)


@pytest.mark.parametrize(
    "loss, match",
    [
        (lambda e, x: 3.0, "got float"),
        (lambda e, x: e(x), r"got shape \(2, 4\)"),
        (lambda e, x: e(x).sum().detach(), "does not depend"),
        (lambda e, x: torch.tensor(3), "one floating-point number"),
    ],
)
def test_what_is_no_loss_is_refused(loss, match):
    engine = build()
    with pytest.raises(ValueError, match=match):
        engine.backward(loss(engine, torch.ones(2, 6)))


def test_step_inside_no_sync_is_refused():
    engine = build()
    with pytest.raises(RuntimeError, match="inside no_sync"), engine.no_sync():
        step(engine)


def test_an_engine_without_optimizer_evaluates_and_refuses_to_step():
    engine = build(config={"train_batch_size": 2, "steps_per_print": None})
    assert engine.optimizer is None and engine.get_lr() == []
    engine.backward(engine(torch.ones(2, 6)).sum())
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.step()


def test_no_parameters_are_fine_where_no_optimizer_is_made():
    plain = {"train_batch_size": 2, "steps_per_print": None}
    assert build(model_parameters=[], config=plain).optimizer is None  # what clients say for inference
    net = tiny.MLP(6, 8, 4, seed=0)
    engine = build(net, model_parameters=[], optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    before = [p.detach().clone() for p in net.parameters()]
    step(engine)
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters()))


# - Progress


def test_progress_line_and_nothing_without_it(caplog):
    with caplog.at_level("INFO", logger="dsx"):
        engine = build(config=config(steps_per_print=2, wall_clock_breakdown=True))
        caplog.clear()
        for index in range(4):
            step(engine, index)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines if line.startswith("step=")] == ["step=2", "step=4"]
    assert "skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" in lines[0]
    assert [line for line in lines if line.startswith("time (ms) | forward: ")]
    caplog.clear()
    with caplog.at_level("INFO", logger="dsx"):
        step(build())
    assert not [r for r in caplog.records if r.getMessage().startswith("step=")]


def test_events_reach_the_writers(tmp_path):
    settings = config(
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
        wall_clock_breakdown=True,
        fp16={"enabled": True, "initial_scale_power": 3},
    )
    engine = build(config=settings)
    x, y = tiny.MLP(6, 8, 4).example(2)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(engine(x.half()).float(), y)
        losses.append(float(loss))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    files = {path.stem: path.read_text().splitlines() for path in (tmp_path / "run").glob("*.csv")}
    expected = {"train_loss", "lr", "loss_scale", "grad_norm", "elapsed_time_ms_forward", "elapsed_time_ms_step"}
    assert {f"Train_Samples_{name}" for name in expected} <= set(files)
    rows = [line.split(",") for line in files["Train_Samples_train_loss"][1:]]
    assert [int(samples) for samples, _ in rows] == [2, 4, 6]
    assert [float(value) for _, value in rows] == pytest.approx(losses, rel=1e-3)
    assert files["Train_Samples_loss_scale"][1].endswith("8.0")


# - Whole weights


def save_weights(rank, world, stage, folder):
    net = tiny.TinyGPT(tied=True, seed=2)
    net.head_frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    net.register_buffer("count", torch.tensor([3.0]))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    engine = build(net, config=config(zero_optimization=zero))
    reference = tiny.TinyGPT(tied=True, seed=2)
    state = engine.module_state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(state[name], value), name
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(folder, "model.safetensors", exclude_frozen_parameters=True)
    return list(state)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_weights_are_those_of_the_plain_model(stage, tmp_path):
    from safetensors.torch import load_file

    names, _ = run_ranks(save_weights, 2, stage, str(tmp_path))
    stored = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert sorted(stored) == sorted(names) and "count" in stored
    reference = tiny.TinyGPT(tied=True, seed=2).state_dict()
    assert all(torch.equal(stored[name], value) for name, value in reference.items())
    safe = load_file(tmp_path / "model.safetensors")
    assert not [name for name in safe if "frozen" in name]
    net = tiny.TinyGPT(tied=True, seed=9)
    net.load_state_dict(safe, strict=False)
    assert all(torch.equal(p, reference[name]) for name, p in net.named_parameters())


def test_buffers_of_a_module_used_twice_have_all_their_names():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = torch.nn.BatchNorm1d(4)

    engine = build(Twice())
    want = engine.module.state_dict()
    assert list(engine.module_state_dict()) == list(want) and "second.running_mean" in want


def bytes_to_gather(rank, world):
    import dsx_comm

    net = tiny.TinyGPT(tied=True, seed=2)
    whole = sum(p.numel() * 4 for p in net.parameters())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = build(net, config=config(zero_optimization=zero))
    with dsx_comm.count_traffic() as traffic:
        engine.module_state_dict()
    return traffic.sent_bytes(op="all_gather_into_tensor") / (whole * (world - 1) / world)


def test_each_weight_travels_once_when_whole_weights_are_asked_for():
    assert max(run_ranks(bytes_to_gather, 2)) < 1.2


def saved_at_stage_3(rank, world, folder, key):
    engine = build(config=config(zero_optimization={"stage": 3, **key}))
    return engine.save_16bit_model(folder)


def test_stage_3_writes_unless_the_config_forbids_to_gather(tmp_path):
    forbidden = {"stage3_gather_16bit_weights_on_model_save": False}
    assert run_ranks(saved_at_stage_3, 2, str(tmp_path), forbidden) == [False, False]
    assert list(Path(tmp_path).iterdir()) == []
    assert run_ranks(saved_at_stage_3, 2, str(tmp_path), {}) == [True, True]
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)


# - Life


@pytest.mark.parametrize("stage", [0, 3])
def test_a_destroyed_engine_leaves_nothing_behind(stage):
    net = tiny.MLP(6, 8, 4, seed=0)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with build(net, config=config(zero_optimization={"stage": stage})) as engine:
        step(engine)
        watched = weakref.ref(engine), weakref.ref(engine.optimizer)
    with pytest.raises(RuntimeError, match="was destroyed"):
        engine(torch.ones(2, 6))
    del engine
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    after = dict(net.named_parameters())
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    net(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_two_engines_live_side_by_side():
    first, second = build(), build(tiny.MLP(6, 8, 4, seed=5))
    losses = [step(first), step(second)]
    alone = [step(build()), step(build(tiny.MLP(6, 8, 4, seed=5)))]
    assert losses == alone
