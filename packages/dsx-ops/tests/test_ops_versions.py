"""Every write through a pointer shows in the tensor's version: a graph that saved the old values raises, as it does
under torch.
"""

import dsx_ops
import pytest
import torch
from dsx_ops import onebit, update
from dsx_ops.codes.exchange import reduce_dequantize
from dsx_ops.cuda import optimizers as cuda_optimizers
from torch import nn

STALE = "modified by an inplace operation"
OPTIMIZERS = {
    "FusedAdam": lambda ps: dsx_ops.FusedAdam(ps, lr=0.1),
    "CPUAdam": lambda ps: dsx_ops.CPUAdam(ps, lr=0.1),
    "split master": lambda ps: dsx_ops.FusedAdam(ps, lr=0.1, split_master=True),
    "Adam8bit": lambda ps: dsx_ops.Adam8bit(ps, lr=0.1),
    "CPUAdagrad": lambda ps: dsx_ops.CPUAdagrad(ps, lr=0.1),
    "FusedLion": lambda ps: dsx_ops.FusedLion(ps, lr=0.1),
    "FusedLamb": lambda ps: dsx_ops.FusedLamb(ps, lr=0.1),
    "SGD": lambda ps: dsx_ops.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: dsx_ops.SGD(ps, lr=0.1, momentum=0.9),
}


@pytest.fixture(params=["native", "reference"])
def way(request):
    """With the compiled module, and without."""
    if request.param == "native":
        yield
        return
    with dsx_ops.reference_only():
        yield


def param_of(name):
    return nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16 if name == "split master" else torch.float32))


def versions(tensors):
    return [t._version for t in tensors]


def all_higher(tensors, before):
    return all(now > then for now, then in zip(versions(tensors), before, strict=True))


def states_of(optimizer, param):
    return [t for t in optimizer.state[param].values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_graph_from_before_a_step_raises(name, steps_before, way):
    param = param_of(name)
    optimizer = OPTIMIZERS[name]([param])
    for _ in range(steps_before):
        param.grad = torch.ones_like(param)
        optimizer.step()
    score = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match=STALE):
        score.backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_and_copies_count_every_step(name, way):
    param, other = param_of(name), param_of(name)
    copy = torch.zeros(2, 3, dtype=torch.float16)
    optimizer = OPTIMIZERS[name]([param, other])
    for step in range(3):
        for p in (param, other):
            p.grad = torch.ones_like(p)
        # A state that this step makes starts at some version; then each step is seen.
        before = versions([param, *states_of(optimizer, param)])
        copy_before = copy._version
        optimizer.step(copy_out={other: copy} if step else None)
        written = [param, *states_of(optimizer, param)]
        if step:
            assert all_higher(written, before)
            assert copy._version > copy_before
        assert param.grad._version == 0  # only read


def test_step_flat_is_a_write_too(way):
    optimizer = dsx_ops.FusedAdam([nn.Parameter(torch.ones(2))], lr=0.1)
    flat, grad, copy = torch.ones(10), torch.ones(10), torch.zeros(10, dtype=torch.bfloat16)
    view = flat[2:5]
    state = optimizer.new_flat_state(flat)
    written = [flat, view, copy, state["exp_avg"], state["exp_avg_sq"]]
    before = versions(written)
    optimizer.step_flat(flat, grad, state, copy_out=copy)
    assert all_higher(written, before)
    assert grad._version == 0


def test_a_refused_step_changes_no_version(way):
    param, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad, bad.grad = torch.ones(3), torch.ones(3, dtype=torch.float64)
    with pytest.raises(dsx_ops.errors.TensorError):
        dsx_ops.FusedAdam([param, bad]).step()
    assert param._version == 0


def clip(tensors):
    params = [nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for p, t in zip(params, tensors):
        p.grad = t
    dsx_ops.clip_grad_norm_(params, 1e-3)


def through_signs(out):
    onebit.unpack_signs(torch.tensor([255], dtype=torch.uint8), torch.ones(1), 8, out=out)


def through_mean(out):
    onebit.mean_of_signs(torch.full((2, 1), 255, dtype=torch.uint8), torch.ones(2), out=out)


def through_codes(out):
    dsx_ops.dequantize(dsx_ops.quantize(torch.ones(8)), 8, out=out)


def through_fp8(out):
    dsx_ops.dequantize_fp8(dsx_ops.quantize_fp8(torch.ones(8)), 8, out=out)


def through_reduction(out):
    q = dsx_ops.quantize(torch.ones(16), bits=8, group_size=8)
    reduce_dequantize(q, ranks=2, numel=8, bits=8, group_size=8, out=out)


def through_flatten(out):
    dsx_ops.flatten([torch.ones(3), torch.zeros(5)], out=out)


WRITES = {
    "scale_": lambda t: dsx_ops.scale_([t], 0.5),
    "clip_grad_norm_": lambda t: clip([t]),
    "ds_quantizer": lambda t: dsx_ops.ds_quantizer(t),
    "token_scatter_": lambda t: dsx_ops.token_scatter_(t.view(1, 4, 2), torch.zeros(1, 1, 2), torch.tensor([[1]])),
    "compress_with_feedback": lambda t: onebit.compress_with_feedback(torch.ones(8), t),
    "unpack_signs": through_signs,
    "mean_of_signs": through_mean,
    "dequantize": through_codes,
    "dequantize_fp8": through_fp8,
    "reduce_dequantize": through_reduction,
    "flatten": through_flatten,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_graph_from_before_a_function_that_writes_raises(write, way):
    x = torch.arange(8, dtype=torch.float32)
    weight = torch.ones(8, requires_grad=True)
    score = (weight * x).sum()
    with torch.no_grad():
        WRITES[write](x)
    assert x._version > 0
    with pytest.raises(RuntimeError, match=STALE):
        score.backward()


def test_codes_given_as_out_count(way):
    for given in (dsx_ops.quantize(torch.ones(64), symmetric=False), dsx_ops.quantize_fp8(torch.ones(64))):
        used = [t for t in given if t.numel()]
        before = versions(used)
        if given.zero.numel():
            dsx_ops.quantize(torch.ones(64), symmetric=False, out=given)
        else:
            dsx_ops.quantize_fp8(torch.ones(64), out=given)
        assert all_higher(used, before)


def test_inference_tensors_have_no_version_and_work(way):
    with torch.inference_mode():
        x = torch.ones(8)
        dsx_ops.scale_([x], 0.5)
        dsx_ops.ds_quantizer(x)
        through_codes(x)
        assert torch.equal(x, torch.ones(8))


def test_a_discriminator_step_between_forward_and_backward_raises_as_under_torch(way):
    """The generator's loss went through the old discriminator: its gradient would be wrong, without a word."""

    def train(make):
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
        optimizer = make(discriminator.parameters())
        fake = generator(torch.randn(4, 2))
        score = discriminator(fake).mean()
        discriminator(fake.detach()).mean().backward()
        optimizer.step()
        score.backward()

    for make in (lambda p: torch.optim.AdamW(p), lambda p: dsx_ops.FusedAdam(p)):
        with pytest.raises(RuntimeError, match=STALE):
            train(make)


# ---- the CUDA path, on the host --------------------------------------------------------------------------------------


@pytest.fixture
def on_emulator(emulator, monkeypatch):
    monkeypatch.setattr(update, "apply", lambda batch: cuda_optimizers.run(emulator, batch))
    monkeypatch.setattr(update, "lamb_update", lambda batch: cuda_optimizers.lamb_update(emulator, batch))
    monkeypatch.setattr(update, "lamb_apply", lambda batch, c: cuda_optimizers.lamb_apply(emulator, batch, c))
    return emulator


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_by_the_cuda_kernels_counts(name, on_emulator):
    param = param_of(name)
    optimizer = OPTIMIZERS[name]([param])
    copy = torch.zeros(2, 3, dtype=torch.float16)
    param.grad = torch.ones_like(param)
    optimizer.step(copy_out={param: copy})
    written = [param, copy, *states_of(optimizer, param)]
    before = versions(written)
    score = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step(copy_out={param: copy})
    assert all_higher(written, before)
    with pytest.raises(RuntimeError, match=STALE):
        score.backward()


def test_scaling_and_clipping_by_the_cuda_kernels_count(emulator, monkeypatch):
    monkeypatch.setattr(update, "_cuda_module", lambda tensors: emulator)
    for write in (WRITES["scale_"], WRITES["clip_grad_norm_"]):
        x, weight = torch.ones(8), torch.ones(8, requires_grad=True)
        score = (weight * x).sum()
        write(x)
        with pytest.raises(RuntimeError, match=STALE):
            score.backward()


# ---- DTensor ---------------------------------------------------------------------------------------------------------


def test_a_distributed_parameter_counts_as_a_whole():
    """What a graph saves is the DTensor, not its shard."""
    from dsx_testkit import run_ranks

    run_ranks(distributed_step, 1)


def distributed_step(rank, n):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (n,))
    for steps_before in (0, 1):
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = dsx_ops.FusedAdam([param], lr=0.1)
        for _ in range(steps_before):
            param.grad = torch.ones_like(param)
            optimizer.step()
        score = (param * param).sum()
        param.grad = torch.ones_like(param)
        optimizer.step()
        with pytest.raises(RuntimeError, match=STALE):
            score.backward()
