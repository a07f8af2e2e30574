"""What an engine measures and reports: events, times, flops profile, trace, stragglers, eigenvalues, gradient noise."""

import csv
import json
import time
from pathlib import Path

import pytest
import torch
from dsx_testkit import run_ranks, tiny


def config(folder, **changes):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "steps_per_print": 2,
        "jsonl": {"enabled": True, "output_path": str(folder), "job_name": ""},
    }
    return {**base, **changes}


def train(settings, steps, net=None, slow=0.0):
    import dsx

    net = net or tiny.TinyGPT(tied=True, seed=2)
    engine = dsx.initialize(model=net, config=settings)[0]
    for index in range(steps * engine.gradient_accumulation_steps()):
        if slow:
            time.sleep(slow)
        tokens, targets = net.example(2, seed=index + 100 * engine.global_rank)
        loss = torch.nn.functional.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
    return engine


def events_in(folder):
    found = {}
    for line in (Path(folder) / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        found.setdefault(event["label"], []).append((event["step"], event["value"]))
    return found


# - Events


def two_ranks(rank, world, folder):
    settings = config(
        folder,
        wall_clock_breakdown=True,
        memory_breakdown=True,
        fp16={"enabled": True, "initial_scale_power": 4},
        zero_optimization={"stage": 2},
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "csv"},
    )
    net = tiny.TinyGPT(tied=True, seed=2)
    engine = train(settings, 4, net)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Mine/value", 3.0, engine.global_samples)])
    engine.destroy()


def test_every_documented_event_arrives_with_its_condition(tmp_path):
    run_ranks(two_ranks, 2, str(tmp_path))
    found = events_in(tmp_path)
    always = {"train_loss", "lr", "loss_scale", "grad_norm", "skipped_steps", "bytes_communicated", "memory_bytes"}
    always |= {
        f"elapsed_time_ms_{name}" for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    }
    for name in always:
        assert [step for step, _ in found[f"Train/Samples/{name}"]] == [4, 8, 12, 16], name
    assert {"Train/Samples/samples_per_second", "Train/Samples/tokens_per_second"} <= set(found)
    assert all(value > 0 for _, value in found["Train/Samples/bytes_communicated"])
    assert [s for s, _ in found["Train/Memory/params"]] == [8, 16]  # at progress lines
    assert {f"Train/Memory/{name}" for name in ("params", "master", "grads", "optimizer", "total", "other")} <= set(
        found
    )
    assert found["Mine/value"] == [(16, 3.0)]
    for (_, whole), (_, inner), (_, waited) in zip(
        *(
            found[f"Train/Samples/elapsed_time_ms_{name}"]
            for name in ("backward", "backward_inner", "backward_allreduce")
        )
    ):
        assert inner + waited == pytest.approx(whole) and waited > 0
    with (tmp_path / "csv" / "Train_Samples_bytes_communicated.csv").open() as stream:
        assert [row[0] for row in csv.reader(stream)] == ["step", "4", "8", "12", "16"]


def test_without_the_conditions_there_are_no_such_events(tmp_path):
    train(config(tmp_path), 3).destroy()
    found = events_in(tmp_path)
    assert "Train/Samples/train_loss" in found and "Train/Samples/loss_scale" not in found
    assert not [label for label in found if "elapsed_time" in label or "Eigenvalues" in label or "Memory/" in label]
    assert "Train/Samples/bytes_communicated" not in found


def test_tokens_are_counted_from_the_inputs(tmp_path):
    train(config(tmp_path, gradient_accumulation_steps=2), 5).destroy()
    found = events_in(tmp_path)
    length = tiny.TinyGPT(tied=True, seed=2).example(2)[0].shape[1]
    pairs = zip(found["Train/Samples/tokens_per_second"], found["Train/Samples/samples_per_second"])
    assert all(tokens == pytest.approx(length * samples) for (_, tokens), (_, samples) in pairs)


def test_an_engine_without_writers_still_has_a_monitor():
    import dsx

    engine = dsx.initialize(model=tiny.MLP(6, 8, 4), config={"train_micro_batch_size_per_gpu": 2})[0]
    assert not engine.monitor.enabled
    engine.monitor.write_events([("a", 1.0, 1)])


# - Flops profile


def profiled(rank, world, folder):
    return [profile_at(stage, f"{folder}/{stage}", rank) for stage in (0, 1, 2, 3)]


def profile_at(stage, folder, rank):
    settings = config(
        folder,
        gradient_accumulation_steps=2,
        steps_per_print=None,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{folder}/out/profile.txt"},
    )
    net = tiny.TinyGPT(tied=True, seed=2)
    before = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()}
    engine = train(settings, 3, net)
    engine.destroy()
    after = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()}
    assert after == before, "no trace of profiler or engine is left"
    return json.loads(Path(folder, "out", "profile.json").read_text()) if rank == 0 else None


def plain_profile():
    from dsx_monitor import FlopsProfiler

    net = tiny.TinyGPT(tied=True, seed=2)
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    for index in (2, 3):
        tokens, targets = net.example(2, seed=index)
        torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
    profiler.stop_profile()
    return profiler


def test_the_section_profiles_the_chosen_step_and_sharding_changes_no_count(tmp_path):
    found, _ = run_ranks(profiled, 2, str(tmp_path))
    plain = plain_profile()
    for stage, profile in enumerate(found):
        check_profile(profile, plain, stage, tmp_path / str(stage))


def check_profile(found, plain, stage, folder):
    assert found["step"] == 1 and found["facts"]["micro_batches"] == 2 and found["facts"]["batch_size"] == 4
    assert (found["facts"]["world_size"], found["facts"]["system"]) == (2, f"ZeRO stage {stage}")
    assert found["modules"]["macs"] == plain.get_total_macs() > 0
    assert found["modules"]["flops"] == plain.get_total_flops()
    assert found["modules"]["params"] == plain.get_total_params()
    assert found["modules"]["backward_flops"] == plain.root.backward_flops > 0
    assert not found["totals"]["unknown"]
    assert found["totals"]["backward_seconds"] > 0 and found["facts"]["step_seconds"] > 0
    text = (folder / "out" / "profile.txt").read_text()
    for row in (
        "world size:",
        "fwd MACs per GPU:",
        "bwd latency:",
        "step latency:",
        "samples/second:",
        "detailed profile",
    ):
        assert row in text
    assert "<!doctype html>" in (folder / "out" / "profile.html").read_text()
    assert (folder / "flops.json").is_file() and (folder / "flops.html").is_file()
    # From then on the operations of a sample are known, so the rate is reported; and times are, as documented.
    labels = events_in(folder)
    assert "Train/Samples/tflops" in labels and "Train/Samples/elapsed_time_ms_forward" in labels


@pytest.mark.parametrize("chosen", [0, 2])
def test_the_profiled_step_is_the_one_that_begins_when_so_many_are_done(chosen, tmp_path):
    import dsx

    section = {"enabled": True, "profile_step": chosen, "output_file": f"{tmp_path}/profile.json"}
    model = torch.nn.Linear(6, 4, bias=False)
    engine = dsx.initialize(model=model, config=config(tmp_path / "run", flops_profiler=section))[0]
    for step in range(4):
        with torch.no_grad():
            engine(torch.randn(50, 6))  # an evaluation is not the step's
        assert engine.global_steps == step
        engine.backward(engine(torch.randn(10 + step, 6)).mean())
        engine.step()
    engine.destroy()
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["modules"]["macs"] == (10 + chosen) * 24 and found["facts"]["micro_batches"] == 1


def test_the_profile_is_announced_once_with_all_its_places(tmp_path, caplog):
    section = {"enabled": True, "profile_step": 1, "output_file": f"{tmp_path}/out/profile.txt"}
    with caplog.at_level("INFO", logger="dsx"):
        train(config(tmp_path / "run", flops_profiler=section), 2).destroy()
    (line,) = (record.getMessage() for record in caplog.records if "flops profile of step" in record.getMessage())
    assert line.endswith(f"step 1: {tmp_path}/run/flops.html and {tmp_path}/out/profile.html")
    assert (tmp_path / "run" / "flops.html").is_file() and (tmp_path / "out" / "profile.html").is_file()


def test_depth_top_and_detail_shape_the_text(tmp_path, caplog):
    with caplog.at_level("INFO", logger="dsx"):
        section = {"enabled": True, "module_depth": 1, "top_modules": 3, "detailed": False}
        train(config(tmp_path, flops_profiler=section), 2).destroy()
    assert "top 3 module classes" in caplog.text and "depth 1:" in caplog.text and "depth 2:" not in caplog.text
    assert "detailed profile" not in caplog.text and "profile summary at step 1" in caplog.text


def test_training_that_ends_inside_the_profiled_step_leaves_nothing(tmp_path):
    import dsx

    net = tiny.TinyGPT(tied=True, seed=2)
    engine = dsx.initialize(model=net, config=config(tmp_path, flops_profiler={"enabled": True, "profile_step": 0}))[0]
    engine(net.example(2)[0])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    engine.destroy()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


# - Trace and stragglers


def traced(rank, world, folder):
    settings = config(
        folder,
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0},
        timeline={"enabled": True, "start_step": 1, "steps": 2},
    )
    train(settings, 5).destroy()


def test_the_trace_shows_all_ranks_gathering_reducing_and_computing(tmp_path):
    run_ranks(traced, 2, str(tmp_path))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        assert {e["cat"] for e in mine} >= {"compute", "gather", "reduce", "wait"}
        assert [e["name"] for e in mine if e["cat"] == "compute"] == ["forward", "backward", "step"] * 2
        assert all(e["dur"] >= 0 for e in mine) and sum(e["args"].get("bytes", 0) for e in mine) > 0
    first, second = (min(e["ts"] for e in events if e["pid"] == rank) for rank in (0, 1))
    assert abs(first - second) < 5e6  # both began after one barrier


def straggles(rank, world, folder):
    settings = config(folder, steps_per_print=None, straggler={"enabled": True, "every": 6})
    train(settings, 6, slow=0.15 if rank == 1 else 0.0).destroy()


def test_the_rank_with_the_slow_loader_is_blamed_not_the_one_that_waits(tmp_path):
    run_ranks(straggles, 2, str(tmp_path))
    (record,) = [json.loads(line) for line in (tmp_path / "stragglers.jsonl").read_text().splitlines()]
    assert record["found"] and record["found"][0].startswith("rank 1 holds the others up in data loading")
    assert not any(text.startswith("rank 0") for text in record["found"])
    assert record["waiting"][0] > record["waiting"][1] and record["own"][1][0] > 100


# - Eigenvalues and gradient noise


def curved(rank, world, folder):
    losses = {}
    for stage in (0, 2, 3):
        for name, extra in (("plain", {}), ("watched", CURVATURE)):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            base = {"gradient_accumulation_steps": 2, "zero_optimization": zero}
            engine = train(config(f"{folder}/{stage}{name}", **base, **extra), 7)
            losses[stage, name] = engine.last_step.loss
            engine.destroy()
    return losses


CURVATURE = {
    "eigenvalue": {
        "enabled": True,
        "layer_name": "blocks",
        "layer_num": 2,
        "gas_boundary_resolution": 2,
        "max_iter": 5,
    },
    "gradient_noise_scale": {"enabled": True},
}


def test_eigenvalues_and_noise_arrive_and_leave_training_as_it_was(tmp_path):
    for losses in run_ranks(curved, 2, str(tmp_path)):
        for stage in (0, 2, 3):
            assert losses[stage, "watched"] == pytest.approx(losses[stage, "plain"], rel=1e-5)
    first = events_in(tmp_path / "0watched")
    for stage in (0, 2, 3):
        found = events_in(tmp_path / f"{stage}watched")
        for block in (0, 1):
            label = f"Train/Eigenvalues/ModelBlockParam_{block}"
            assert [step for step, _ in found[label]] == [8, 24, 40, 56]
            assert all(0 < value <= 1 for _, value in found[label])
            for (_, value), (_, expected) in zip(found[label], first[label]):
                assert value == pytest.approx(
                    expected, rel=1e-3
                )  # the mean loss has one Hessian, however it is sharded
        assert max(found[f"Train/Eigenvalues/ModelBlockParam_{b}"][0][1] for b in (0, 1)) == 1.0
        noise, expected = (events["Train/Samples/gradient_noise_scale"] for events in (found, first))
        assert noise == [(step, pytest.approx(value, rel=1e-3)) for step, value in expected] and noise
        assert "Train/Samples/gradient_noise_scale" not in events_in(tmp_path / f"{stage}plain")


def test_the_noise_scale_of_the_engine_is_that_of_its_gradients(tmp_path):
    import dsx
    from dsx_monitor import GradientNoise

    settings = config(tmp_path, gradient_accumulation_steps=4, gradient_noise_scale={"enabled": True})
    settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    net, twin = (tiny.MLP(6, 8, 4, seed=3) for _ in range(2))
    engine = dsx.initialize(model=net, config=settings)[0]
    noise = GradientNoise(2, 8)
    for step in range(6):
        squares, whole = 0.0, [torch.zeros_like(p) for p in twin.parameters()]
        for micro in range(4):
            x, y = twin.example(2, seed=4 * step + micro)
            y = y + 3  # a direction all samples agree on
            engine.backward(torch.nn.functional.mse_loss(engine(x), y))
            engine.step()
            parts = torch.autograd.grad(torch.nn.functional.mse_loss(twin(x), y), list(twin.parameters()))
            squares += sum(float((g**2).sum()) for g in parts) / 4
            whole = [a + g / 4 for a, g in zip(whole, parts)]
        noise.update(squares, sum(float((g**2).sum()) for g in whole))
    engine.destroy()
    assert noise.scale is not None
    (_, last) = events_in(tmp_path)["Train/Samples/gradient_noise_scale"][-1]
    assert last == pytest.approx(noise.scale, rel=1e-3)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"eigenvalue": {"enabled": True, "layer_name": "blocks"}}, "eigenvalue.layer_num"),
        ({"eigenvalue": {"enabled": True, "layer_name": "nowhere", "layer_num": 1}}, r"no module 'nowhere'.*blocks"),
        ({"gradient_noise_scale": {"enabled": True}}, "gradient_accumulation_steps > 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_the_start(changes, match, tmp_path):
    import dsx

    with pytest.raises((ValueError, RuntimeError), match=match):
        dsx.initialize(model=tiny.TinyGPT(tied=True, seed=2), config=config(tmp_path, **changes))


def test_dump_state_tells_what_the_engine_is_made_of(tmp_path, caplog):
    with caplog.at_level("INFO", logger="dsx"):
        train(config(tmp_path, dump_state=True, memory_breakdown=True), 2).destroy()
    for text in ("state of the engine:", "TinyGPT", "parameter group 0", "bytes held (MiB)", "MemoryUse", "jsonl"):
        assert text in caplog.text
    assert "memory (MiB) at step 2 | params:" in caplog.text


def test_a_loaded_configuration_makes_monitors_by_hand(tmp_path):
    from dsx.config import load_config
    from dsx.monitor import MonitorMaster
    from dsx.profiling.flops_profiler import FlopsProfiler, get_model_profile

    loaded = load_config(config(tmp_path), world_size=1)
    with MonitorMaster(loaded.monitor_config, rank=0) as monitor:
        monitor.write_events([("Time per step", 0.5, 16)])
    assert events_in(tmp_path) == {"Time per step": [(16, 0.5)]}
    assert FlopsProfiler(tiny.MLP()) and get_model_profile(tiny.MLP(6, 8, 4), (2, 6), print_profile=False)
