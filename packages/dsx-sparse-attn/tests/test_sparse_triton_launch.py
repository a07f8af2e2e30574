"""How the Triton kernels are started: on the tensors' device, with smaller tiles where the first do not start, lists
made once.
"""

import contextlib

import pytest
import torch
from dsx_sparse_attn import SparseAttentionError
from dsx_sparse_attn.attention import Options, checked
from dsx_sparse_attn.backends import triton_gpu
from dsx_sparse_attn.backends.triton_gpu import Launch
from dsx_sparse_attn.backends.triton_table import Need

errors = pytest.importorskip("triton.runtime.errors")


class Kernels:
    """Stands for the module of kernels: notes what is started, and refuses tiles of too many rows."""

    def __init__(self, most_rows=1 << 20):
        self.started, self.most_rows, self.current = [], most_rows, None

    def __getattr__(self, name):
        kernels = self

        class Kernel:
            def __getitem__(self, grid):
                def start(**arguments):
                    if arguments["ROWS"] > kernels.most_rows:
                        raise errors.OutOfResources(1000, 500, "shared memory")
                    kernels.started.append((name, grid, arguments, kernels.current))

                return start

        return Kernel()


@pytest.fixture
def kernels(monkeypatch):
    made = Kernels()

    @contextlib.contextmanager
    def current(device):
        made.current = device
        yield
        made.current = None

    monkeypatch.setattr(triton_gpu, "_kernels", lambda: made)
    monkeypatch.setattr(triton_gpu, "_current", current)
    return made


def call(block=64, seq=256, dim=64, dtype=torch.bfloat16, **options):
    q, k = torch.zeros(2, 4, seq, dim, dtype=dtype), torch.zeros(2, 2, seq, dim, dtype=dtype)
    layout = torch.ones(1, seq // block, seq // block, dtype=torch.int64)
    return checked(q, k, k, layout, Options(block=block, **options))


def run(c):
    out, lse = triton_gpu.forward(c)
    return triton_gpu.backward(c, torch.zeros_like(out), out, lse, True)


def test_every_kernel_starts_while_the_tensors_device_is_current(kernels):
    run(call())
    assert [s[0] for s in kernels.started] == ["forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel"]
    assert all(s[3] == torch.device("cpu") for s in kernels.started) and kernels.current is None


def test_the_device_of_cuda_tensors_is_made_current_and_no_other():
    guard = triton_gpu._current(torch.device("cuda", 1))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 1
    assert not isinstance(triton_gpu._current(torch.device("cpu")), torch.cuda.device)


def test_tiles_that_triton_does_not_start_give_way_to_smaller_ones(kernels):
    run(call())
    assert kernels.started[0][2]["ROWS"] == 128
    kernels.started.clear()
    kernels.most_rows = 64
    run(call())
    assert [s[2]["ROWS"] for s in kernels.started] == [64, 64, 64, 64]


def test_when_no_tiles_start_the_error_names_the_way_out(kernels):
    kernels.most_rows = 8
    with pytest.raises(SparseAttentionError, match=r'does not start the forward kernel .*backend="flex" or "torch"'):
        run(call())


def test_the_programs_cover_every_tile_of_every_head_once(kernels):
    c = call(causal=True, dropout_p=0.5)
    run(c)
    for name, grid, arguments, _ in kernels.started:
        if name == "delta_kernel":
            assert grid == (2 * 4 * 4,)
            continue
        tiles = 256 // (arguments["COLS"] if name == "dkv_kernel" else arguments["ROWS"])
        heads = 4 // arguments.get("members", 1)
        assert grid == (2 * heads * tiles,) == (arguments["lines"] * arguments["copies"],)
        assert arguments["DROPOUT"] and arguments["CAUSAL"] and arguments["drop_below"] == -(1 << 31)


def test_a_second_call_with_the_same_layout_starts_with_the_same_lists(kernels):
    layout = torch.ones(1, 4, 4, dtype=torch.int64)
    q = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    for _ in range(2):
        run(checked(q, q, q, layout, Options(block=64)))
    first, second = kernels.started[:4], kernels.started[4:]
    for a, b in zip(first, second, strict=True):
        if a[0] != "delta_kernel":
            assert all(a[2][name] is b[2][name] for name in ("STARTS", "ITEMS", "BITS", "ORDER"))


def test_rows_that_lie_too_far_apart_for_32_bits_are_copied_together():
    memory = torch.zeros((1 << 23) + 8, dtype=torch.uint8)
    near, far = (memory.as_strided((1, 1, 2, 8), (0, 0, stride, 1)) for stride in (8, 1 << 23))
    assert triton_gpu._readable(near) is near and triton_gpu._readable(far).stride(-2) == 8


def test_a_launch_holds_all_arguments_of_its_kernel():
    """The kernels' own parameter lists; without the interpreter they are compiled functions that know them."""
    kernels = pytest.importorskip("dsx_sparse_attn.backends.triton_kernels")
    if not hasattr(kernels.forward_kernel, "arg_names"):
        pytest.skip("the kernels are interpreted")
    c = call(rpe=torch.zeros(256, 256), key_padding_mask=torch.zeros(2, 256), dropout_p=0.1)
    for described in triton_gpu.launches(c):
        need = described.need
        tiles = triton_gpu.fitting(need, triton_gpu.device_of(c.q.device))[0] if need else triton_gpu.Tiles(0, 0, 0, 0)
        launch = described.make(tiles)
        assert (isinstance(launch, Launch) and need is None) or isinstance(need, Need)
        assert set(launch.arguments) == set(launch.kernel.arg_names)
