"""torch.cuda in Python: what the CPU build leaves out, in terms of the native library."""

from __future__ import annotations

import faulthandler
from typing import Any

import torch

from . import data_parallel, native
from .random_state import Generator, random_functions
from .refused import install_refusals
from .streams import Event, Stream, StreamContext, current_stream, default_stream, index_of, set_stream


# ---------------------------------------------------------------- devices
class _Properties:
    """torch.cuda.get_device_properties(): the figures of an H100, with the simulated memory."""

    name = "NVIDIA H100 (simulated)"
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    shared_memory_per_block_optin = 227 << 10
    shared_memory_per_block = 48 << 10
    shared_memory_per_multiprocessor = 228 << 10
    L2_cache_size = 50 << 20
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    is_integrated = is_multi_gpu_board = 0
    gcnArchName = ""

    def __init__(self, index: int) -> None:
        self.total_memory = native.read("sim_stats", _checked(index))["total"]
        self.uuid = f"00000000-0000-0000-0000-{index:012d}"


class _Runtime:
    """torch.cuda.cudart(): the calls that programs make through it; any other is named."""

    class cudaError:
        """Its codes."""

        success = 0

        def __new__(cls, code: int = 0) -> int:  # type: ignore[misc]
            """A code is the number itself."""
            return code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Pins the program's own memory."""
        torch.ops.simcuda.watch_registered_memory()
        torch.empty(1, pin_memory=True)  # before torch has made some, is_pinned() is False for all memory
        native.lib.sim_pin(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Ends the pinning; a copy that still uses the memory is reported."""
        native.lib.sim_unpin(address)
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Free and total bytes."""
        return _mem_get_info(device)

    def cudaProfilerStart(self) -> int:
        """There is no profiler to start."""
        return 0

    def cudaProfilerStop(self) -> int:
        """There is no profiler to stop."""
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        """The text of a code."""
        return "no error" if code == 0 else f"error {code}"

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"simcuda: cudart().{name} is not simulated")


class _Nvtx:
    """torch.cuda.nvtx: ranges for a profiler that is not there; they nest and cost nothing."""

    depth = 0

    @classmethod
    def range_push(cls, message: str) -> int:
        """The depth before."""
        cls.depth += 1
        return cls.depth - 1

    @classmethod
    def range_pop(cls) -> int:
        """The depth after."""
        cls.depth -= 1
        return cls.depth

    class range:
        """A range around a block or a function."""

        def __init__(self, message: str, *arguments: Any, **keywords: Any) -> None:
            self.message = message

        def __enter__(self) -> None:
            _Nvtx.range_push(self.message)

        def __exit__(self, *_: object) -> None:
            _Nvtx.range_pop()

        def __call__(self, function: Any) -> Any:
            return function

    @staticmethod
    def range_start(message: str) -> int:
        """A handle."""
        return 0

    @staticmethod
    def range_end(handle: int) -> None:
        """Ends what range_start began."""

    @staticmethod
    def mark(message: str) -> None:
        """A point in time."""


def _checked(index: int) -> int:
    if not 0 <= index < native.lib.sim_devices():
        raise RuntimeError(
            f"CUDA error: invalid device ordinal {index}; there are {native.lib.sim_devices()} simulated devices"
            " (DSX_SIMCUDA_DEVICES, or install(devices=))"
        )
    return index


def _set_device(device: Any) -> None:
    native.lib.sim_set_device(_checked(index_of(device)))


def _exchange_device(device: int) -> int:
    return native.lib.sim_get_device() if device < 0 else native.lib.sim_set_device(_checked(device))


def _synchronize(device: Any = None) -> None:
    failed = native.lib.sim_synchronize(_checked(index_of(device))).decode()
    if failed:
        raise RuntimeError(failed)


_sync_debug = {"default": 0, "warn": 1, "error": 2}


def _set_sync_debug_mode(mode: int | str) -> None:
    number = _sync_debug[mode] if isinstance(mode, str) else mode
    if number not in _sync_debug.values():
        raise RuntimeError("invalid value of debug_mode, expected one of 0, 1, 2 or default, warn, error")
    native.lib.sim_option(b"sync_debug", float(number))
    _set_sync_debug_mode.mode = number  # type: ignore[attr-defined]


# ---------------------------------------------------------------- memory counters
def _counter(key: str) -> Any:
    return lambda device=None: native.read("sim_stats", _checked(index_of(device)))[key]


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    stats = native.read("sim_stats", _checked(index_of(device)))
    return stats["total"] - stats["reserved_bytes.all.current"], stats["total"]


_EXTRA = {"num_sync_all_streams": 0, "max_split_size": -1}
_OVERSIZE = [f"oversize_{kind}.{what}" for kind in ("allocations", "segments") for what in ("current", "peak")]


def _memory_stats(device: Any = None) -> dict[str, Any]:
    stats = native.read("sim_stats", _checked(index_of(device)))
    stats.pop("total")
    stats.update(_EXTRA)
    for key in _OVERSIZE:
        stats[key] = stats[key.rsplit(".", 1)[0] + ".allocated"] = stats[key.rsplit(".", 1)[0] + ".freed"] = 0
    return dict(sorted(stats.items()))


def _nested_stats(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in _memory_stats(device).items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    index = _checked(index_of(device))
    native.lib.sim_set_limit(index, int(fraction * native.read("sim_stats", index)["total"]))


# ---------------------------------------------------------------- storages (compiled out of the CPU build)
def _install_storage() -> None:
    resize = torch.UntypedStorage.resize_
    base = torch._C.StorageBase

    def storage_resize(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, nbytes)
        view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.simcuda.storage_resize_(view, int(nbytes))
        return self

    def storage_new(cls: Any, *args: Any, device: Any = None, **kw: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            size = args[0] if args else 0
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kw["device"] = device
        return base.__new__(cls, *args, **kw)

    torch.UntypedStorage.resize_ = storage_resize  # type: ignore[method-assign]
    torch.UntypedStorage.__new__ = staticmethod(storage_new)  # type: ignore[method-assign]


# ---------------------------------------------------------------- putting it in place
def _functions() -> dict[str, Any]:
    """The functions of torch.cuda that are replaced, by name."""

    def nothing() -> None:
        return None

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": lambda function, **kw: function(),
        "device_count": lambda: native.lib.sim_devices(),
        "current_device": lambda: native.lib.sim_get_device(),
        "set_device": _set_device,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": lambda device: _exchange_device(device),  # dynamo wants an object of its own
        "can_device_access_peer": lambda device, peer: index_of(device) != index_of(peer),
        "synchronize": _synchronize,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: getattr(_set_sync_debug_mode, "mode", 0),
        "ipc_collect": nothing,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "memory_allocated": _counter("allocated_bytes.all.current"),
        "max_memory_allocated": _counter("allocated_bytes.all.peak"),
        "memory_reserved": _counter("reserved_bytes.all.current"),
        "max_memory_reserved": _counter("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": lambda device=None: native.lib.sim_reset_peak(index_of(device)),
        "reset_accumulated_memory_stats": lambda device=None: native.lib.sim_reset_accumulated(index_of(device)),
        "empty_cache": lambda: native.lib.sim_empty_cache(native.lib.sim_get_device()),
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
        "memory_stats_as_nested_dict": _nested_stats,
        "set_per_process_memory_fraction": _set_fraction,
        "get_device_properties": lambda device=None: _Properties(index_of(device)),
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_capability": lambda device=None: (_Properties.major, _Properties.minor),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: native.lib.sim_sleep(cycles / 1.5e9),
        "cudart": _Runtime,
        "nvtx": _Nvtx,
    }


def _install_bindings() -> None:
    """The functions that torch expects of its own compiled CUDA bindings."""
    bindings: Any = torch._C
    bindings._cuda_getDeviceCount = lambda: native.lib.sim_devices()
    bindings._cuda_isInBadFork = False
    bindings._cuda_getCurrentRawStream = lambda index: native.lib.sim_current_stream(index)
    bindings._cuda_getCurrentStream = lambda index: (native.lib.sim_current_stream(index), index, 1)
    bindings._cuda_getDevice = lambda: native.lib.sim_get_device()
    bindings._cuda_setDevice = lambda index: native.lib.sim_set_device(_checked(index))  # dynamo wants one of its own
    bindings._cuda_isCurrentStreamCapturing = lambda: False
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "12.8"  # type: ignore[assignment]  # libraries ask for it before they take a CUDA branch
    for name, function in data_parallel.BINDINGS.items():
        setattr(bindings, name, function)


def _install_fault_handler() -> None:
    """The handler of faults comes before faulthandler's, also when a program switches that one on later."""
    enable = faulthandler.enable

    def enable_behind(*arguments: Any, **keywords: Any) -> None:
        enable(*arguments, **keywords)
        native.lib.sim_fault_handler()

    faulthandler.enable = enable_behind  # type: ignore[assignment]
    native.lib.sim_fault_handler()


def install() -> None:
    """Takes over torch.cuda."""
    cuda: Any = torch.cuda
    _install_bindings()
    for name, value in _functions().items():
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    cuda.memory._lazy_init = cuda.random._lazy_init = lambda: None
    cuda.default_generators = tuple(Generator(index) for index in range(native.lib.sim_devices()))
    for name, function in random_functions(cuda.default_generators).items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)
    _install_storage()
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # quietly; it warns of a build without cuDNN
    install_refusals()
    _install_fault_handler()
