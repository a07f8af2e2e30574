"""torch.cuda in Python: streams, events, memory counters, random state and storages of the simulated device."""

import contextlib

import torch

from . import native


def _index(device=None):
    """The device number meant by None, an int, a string or a torch.device."""
    if device is None:
        return native.lib.sim_get_device()
    if isinstance(device, int):
        return native.lib.sim_get_device() if device < 0 else device
    device = torch.device(device)
    return native.lib.sim_get_device() if device.index is None else device.index


# ---------------------------------------------------------------- streams and events
class Stream(torch.Stream):
    """torch.cuda.Stream over torch's device-neutral stream."""

    def __new__(cls, device=None, priority=0, **kw):
        if "stream_id" in kw:
            return super().__new__(cls, stream_id=kw["stream_id"], device_index=kw["device_index"], device_type=1)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self):
        return self.stream_id

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        event.wait(self)

    def __hash__(self):
        return hash((self.stream_id, self.device))

    def __eq__(self, other):
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)


class Event(torch.Event):
    """torch.cuda.Event over torch's device-neutral event."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def elapsed_time(self, end):  # torch.Event's own refuses subclasses
        return native.lib.sim_elapsed(self.event_id, end.event_id)

    def record(self, stream=None):
        super().record(_current_stream() if stream is None else stream)

    def wait(self, stream=None):
        super().wait(_current_stream() if stream is None else stream)


def _current_stream(device=None):
    index = _index(device)
    return Stream(stream_id=native.lib.sim_current_stream(index), device_index=index)


def _default_stream(device=None):
    return Stream(stream_id=0, device_index=_index(device))


def _set_stream(stream):
    torch._C._accelerator_setStream(stream)


class StreamContext:
    """`with torch.cuda.stream(s)`: the stream and its device are current inside."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is None:
            return
        self.device = native.lib.sim_get_device()
        self.before = _current_stream(self.stream.device)
        native.lib.sim_set_device(self.stream.device.index)
        _set_stream(self.stream)

    def __exit__(self, *_):
        if self.stream is None:
            return
        _set_stream(self.before)
        native.lib.sim_set_device(self.device)


# ---------------------------------------------------------------- devices
class _Properties:
    name = "NVIDIA Sim"
    major = 9
    minor = 0
    multi_processor_count = 132
    warp_size = 32
    shared_memory_per_block_optin = 227 << 10
    shared_memory_per_block = 48 << 10
    L2_cache_size = 50 << 20
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048

    def __init__(self, index):
        self.total_memory = _stat(index, "total")


class _Runtime:
    """torch.cuda.cudart()"""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address, nbytes, flags):
        native.lib.sim_pin(address, nbytes)
        return 0

    def cudaHostUnregister(self, address):
        native.lib.sim_unpin(address)
        return 0


class _Nvtx:
    """torch.cuda.nvtx: does nothing."""

    @staticmethod
    def range_push(message):
        return 0

    @staticmethod
    def range_pop():
        return 0

    @staticmethod
    def range(message, *args, **kwargs):
        return contextlib.nullcontext()

    @staticmethod
    def mark(message):
        return None


def _set_device(device):
    native.lib.sim_set_device(_index(device))


def _exchange_device(device):
    return native.lib.sim_get_device() if device < 0 else native.lib.sim_set_device(device)


def _set_device_number(index):
    native.lib.sim_set_device(index)


# ---------------------------------------------------------------- memory counters
_STATS = ("allocated", "peak", "reserved", "peak_reserved", "total", "mallocs", "frees", "retries", "ooms")


def _stat(index, name):
    return native.lib.sim_stat(index, _STATS.index(name))


def _counter(name):
    return lambda device=None: _stat(_index(device), name)


def _mem_get_info(device=None):
    index = _index(device)
    return _stat(index, "total") - _stat(index, "reserved"), _stat(index, "total")


def _memory_stats(device=None):
    index = _index(device)
    return {
        "allocated_bytes.all.current": _stat(index, "allocated"),
        "allocated_bytes.all.peak": _stat(index, "peak"),
        "reserved_bytes.all.current": _stat(index, "reserved"),
        "reserved_bytes.all.peak": _stat(index, "peak_reserved"),
        "num_alloc_retries": _stat(index, "retries"),
        "num_ooms": _stat(index, "ooms"),
    }


def _set_fraction(fraction, device=None):
    index = _index(device)
    native.lib.sim_set_limit(index, int(fraction * _stat(index, "total")))


# ---------------------------------------------------------------- random state
class Generator:
    """One entry of torch.cuda.default_generators."""

    def __init__(self, index):
        self.index = index
        self.device = torch.device("cuda", index)

    def get_state(self):
        return torch.ops.sim.rng_get(self.index)

    def set_state(self, state):
        torch.ops.sim.rng_set(self.index, state)

    def manual_seed(self, seed):
        torch.ops.sim.rng_seed(self.index, seed if seed < 1 << 63 else seed - (1 << 64))
        return self

    def initial_seed(self):
        return torch.ops.sim.rng_initial_seed(self.index)


def _random_functions(generators):
    def get_rng_state(device="cuda"):
        return generators[_index(device)].get_state()

    def set_rng_state(state, device="cuda"):
        generators[_index(device)].set_state(state.cpu())

    def get_rng_state_all():
        return [generator.get_state() for generator in generators]

    def set_rng_state_all(states):
        for generator, state in zip(generators, states):
            generator.set_state(state)

    def manual_seed(seed):
        generators[native.lib.sim_get_device()].manual_seed(int(seed))

    def manual_seed_all(seed):
        for generator in generators:
            generator.manual_seed(int(seed))

    def initial_seed():
        return generators[native.lib.sim_get_device()].initial_seed()

    def seed():
        return None

    functions = (get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all)
    functions += (manual_seed, manual_seed_all, initial_seed, seed)
    return {function.__name__: function for function in functions}


# ---------------------------------------------------------------- storages (compiled out of the CPU wheel)
def _install_storage():
    resize = torch.UntypedStorage.resize_
    base = torch._C.StorageBase

    def storage_resize(self, nbytes):
        if self.device.type != "cuda":
            return resize(self, nbytes)
        view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.sim.storage_resize_(view, int(nbytes))
        return self

    def storage_new(cls, *args, device=None, **kw):
        if device is not None and torch.device(device).type == "cuda":
            size = args[0] if args else 0
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kw["device"] = device
        return base.__new__(cls, *args, **kw)

    torch.UntypedStorage.resize_ = storage_resize
    torch.UntypedStorage.__new__ = staticmethod(storage_new)


# ---------------------------------------------------------------- putting it in place
def _functions():
    """The functions of torch.cuda that are replaced, by name."""

    def nothing():
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
        "_maybe_exchange_device": _exchange_device,
        "synchronize": lambda device=None: native.lib.sim_synchronize(_index(device)),
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "set_stream": _set_stream,
        "memory_allocated": _counter("allocated"),
        "max_memory_allocated": _counter("peak"),
        "memory_reserved": _counter("reserved"),
        "max_memory_reserved": _counter("peak_reserved"),
        "reset_peak_memory_stats": lambda device=None: native.lib.sim_reset_peak(_index(device)),
        "empty_cache": lambda: native.lib.sim_empty_cache(native.lib.sim_get_device()),
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
        "set_per_process_memory_fraction": _set_fraction,
        "get_device_properties": lambda device=None: _Properties(_index(device)),
        "get_device_name": lambda device=None: _Properties.name,
        "get_device_capability": lambda device=None: (_Properties.major, _Properties.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: native.lib.sim_sleep(cycles / 1.5e9),
        "cudart": _Runtime,
        "nvtx": _Nvtx,
    }


def _install_bindings():
    """What torch expects of its own compiled CUDA bindings."""
    native = torch._C
    native._cuda_getDeviceCount = lambda: native.lib.sim_devices()
    native._cuda_isInBadFork = False
    native._cuda_getCurrentRawStream = lambda index: native.lib.sim_current_stream(index)
    native._cuda_getCurrentStream = lambda index: (native.lib.sim_current_stream(index), index, 1)
    native._cuda_getDevice = lambda: native.lib.sim_get_device()
    native._cuda_setDevice = _set_device_number
    torch.backends.cuda.is_built = lambda: True


def install():
    """Takes over torch.cuda."""
    cuda = torch.cuda
    _install_bindings()
    for name, value in _functions().items():
        for module in (cuda, cuda.memory, cuda.random, cuda.streams):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    cuda.memory._lazy_init = cuda.random._lazy_init = lambda: None
    cuda.default_generators = tuple(Generator(index) for index in range(native.lib.sim_devices()))
    for name, function in _random_functions(cuda.default_generators).items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)
    _install_storage()
