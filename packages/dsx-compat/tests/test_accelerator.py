"""The device-independent calls that scripts make, on the CPU, and on CUDA as torch.cuda is called."""

import os
import subprocess
import sys

import dsx
import pytest
import torch
from dsx_compat import accelerator as accelerators
from dsx_compat.accelerator import (
    Accelerator,
    AcceleratorError,
    CPUAccelerator,
    CUDAAccelerator,
    get_accelerator,
    set_accelerator,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    set_accelerator(None)
    yield
    set_accelerator(None)


@pytest.fixture
def cpu():
    return CPUAccelerator()


# ---- which one -------------------------------------------------------------------------------------------------------


def test_the_machine_decides_and_the_choice_stays():
    found = get_accelerator()
    assert found is get_accelerator() is dsx.get_accelerator()
    assert found.device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert accelerators.is_current_accelerator_supported()


def test_a_cuda_device_is_preferred(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(get_accelerator(), CUDAAccelerator)


def test_the_environment_overrides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(get_accelerator(), CPUAccelerator)


@pytest.mark.parametrize(("name", "words"), [("xpu", "expected cuda or cpu"), ("cuda", "torch sees no CUDA device")])
def test_an_accelerator_that_is_not_here_is_named(monkeypatch, name, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(AcceleratorError, match=words):
        get_accelerator()


def test_a_class_of_ones_own_can_be_set():
    class Mine(CPUAccelerator):
        _name = "mine"

    mine = Mine()
    set_accelerator(mine)
    assert get_accelerator() is mine
    with pytest.raises(AcceleratorError, match="derived from"):
        set_accelerator(object())
    assert get_accelerator() is mine


def test_importing_asks_no_device():
    code = (
        "import torch; torch.cuda.is_available = torch.cuda.device_count = lambda *a: 1 / 0\n"
        "import dsx_compat.accelerator, dsx; dsx.get_accelerator\n"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr


# ---- the CPU ---------------------------------------------------------------------------------------------------------


def test_a_training_step_written_for_any_device(cpu):
    """What the public examples call, in their order."""
    cpu.set_device(0)
    model = torch.nn.Linear(4, 2).to(cpu.current_device_name())
    with cpu.device(0):
        x = torch.randn(3, 4)
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with cpu.stream(cpu.Stream()):
        start.record()
        cpu.range_push("forward")
        loss = model(x).square().mean()
        cpu.range_pop()
        loss.backward()
        end.record(cpu.current_stream())
    cpu.current_stream().wait_stream(cpu.default_stream())
    end.synchronize()
    cpu.synchronize()
    assert end.query() and start.elapsed_time(end) > 0
    assert cpu.on_accelerator(model.weight) and not cpu.is_pinned(x) and cpu.pin_memory(x) is x
    cpu.empty_cache()


def test_ranges_are_seen_by_the_profiler(cpu):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cpu.range_push("outer", domain="dsx")
        cpu.range_push("inner")
        torch.ones(3).sum()
        cpu.range_pop()
        cpu.range_pop()
    names = {event.name for event in profile.events()}
    assert {"dsx:outer", "inner"} <= names
    with pytest.raises(AcceleratorError, match="no range to end"):
        cpu.range_pop()


def test_memory_is_the_process_s(cpu):
    before = cpu.memory_allocated()
    assert 0 < before <= cpu.max_memory_allocated() <= cpu.total_memory()
    assert 0 < cpu.available_memory() <= cpu.total_memory()
    block = torch.ones(32 << 20, dtype=torch.uint8)
    assert cpu.memory_allocated() >= before + (16 << 20)
    del block
    cpu.reset_max_memory_allocated()
    small = cpu.max_memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    cpu.memory_allocated()
    del block
    assert cpu.max_memory_allocated() >= small + (32 << 20)
    stats = cpu.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    assert cpu.memory_cached() == pytest.approx(cpu.memory_reserved(), rel=0.1)


def test_random_numbers_are_torchs(cpu):
    cpu.manual_seed(3)
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first) and cpu.initial_seed() == 3
    assert cpu.default_generator(0) is torch.default_generator and cpu.random() is torch.random


def test_tensors_by_dtype(cpu):
    dtypes = {
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }
    for name, dtype in dtypes.items():
        made = getattr(cpu, name)([1, 2])
        assert made.dtype == dtype and made.tolist() == [1, 2] and made.device.type == "cpu"
    assert torch.float32 in cpu.supported_dtypes() and torch.bfloat16 in cpu.supported_dtypes()


def test_graphs_raise_instead_of_skipping_the_work(cpu):
    for call in (cpu.create_graph, lambda: cpu.capture_to_graph(None), lambda: cpu.replay_graph(None)):
        with pytest.raises(AcceleratorError, match="call it directly"):
            call()


def test_ranks_of_a_host(cpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert (cpu.current_device(), cpu.device_count(), cpu.current_device_name()) == (3, 5, "cpu")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cpu.device_count() >= 1
    environment = {}
    cpu.set_visible_devices_envs(environment, [1, "GPU-7"])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,GPU-7"}


def test_backends_and_builders(cpu):
    assert cpu.communication_backend_name() == "gloo" and CUDAAccelerator().communication_backend_name() == "nccl"
    cpu.set_compile_backend("aot_eager")
    assert cpu.get_compile_backend() == "aot_eager"
    with pytest.raises(AcceleratorError, match="compile backend: got 'nothing'"):
        cpu.set_compile_backend("nothing")
    import dsx_nvme
    import dsx_ops

    assert cpu.get_op_builder("AsyncIOBuilder") is dsx_nvme.AsyncIOBuilder
    assert cpu.create_op_builder("CPUAdamBuilder").load().CPUAdam is dsx_ops.CPUAdam
    assert cpu.get_op_builder("NoSuchBuilder") is None and cpu.create_op_builder("CPUAdam") is None
    assert not cpu.is_triton_supported() and cpu.lazy_call(lambda: 4) == 4
    assert cpu.is_synchronized_device() and cpu.use_host_timers()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for torch.cuda: remembers what was called with which arguments."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return {"current_device": 1, "mem_get_info": (5, 9), "is_available": True}.get(name, name)

        return call


@pytest.fixture
def recorded(monkeypatch):
    from dsx_compat.accelerator import cuda

    recorder = Recorder()
    monkeypatch.setattr(cuda.torch, "cuda", recorder)
    return recorder


def test_cuda_calls_torch_cuda(recorded):
    cuda = CUDAAccelerator()
    assert (cuda.device_name(), cuda.device_name(2), cuda.current_device_name()) == ("cuda", "cuda:2", "cuda:1")
    assert cuda.device(1) == torch.device("cuda", 1)
    assert cuda.available_memory(1) == 5 and cuda.memory_allocated(1) == "memory_allocated"
    assert not cuda.use_host_timers() and not cuda.is_synchronized_device()
    cuda.set_device(3)
    cuda.synchronize()
    cuda.set_rng_state("state", 2)
    cuda.reset_max_memory_allocated(1)
    for call in (("set_device", 3), ("synchronize", None), ("set_rng_state", "state", torch.device("cuda:2"))):
        assert call in recorded.calls
    assert ("reset_peak_memory_stats", 1) in recorded.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(os.environ.get("DSX_SIMCUDA") == "1", reason="graphs are not captured on the simulated device")
def test_a_graph_on_a_device():
    cuda = CUDAAccelerator()
    x = cuda.FloatTensor([1.0, 2.0])
    assert cuda.on_accelerator(x) and cuda.memory_allocated() > 0 and cuda.available_memory() <= cuda.total_memory()
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        x * 2
    graph = cuda.create_graph()
    with cuda.capture_to_graph(graph):
        y = x * 2
    x.fill_(5.0)
    cuda.replay_graph(graph)
    cuda.synchronize()
    assert y.tolist() == [10.0, 10.0]


def test_every_method_of_the_base_is_there_on_both():
    for cls in (CPUAccelerator, CUDAAccelerator):
        assert not cls.__abstractmethods__ and issubclass(cls, Accelerator)
