"""Run on the simulated device by test_simcuda_device.py: many small programs in one process, their outcome as JSON.

Every case returns what the test compares; beside it stand the kinds of the reports that came, the waits of the host,
and the lines that the reports blame.
"""

import copy
import ctypes
import io
import json
import os
import sys
import threading
from collections import Counter

import dsx_simcuda
import torch
from torch import nn

SIZE = 1 << 16
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def ones(*shape, **kw):
    return torch.ones(*shape, device="cuda", **kw)


def randn(*shape, **kw):
    return torch.randn(*shape, device="cuda", **kw)


# ---------------------------------------------------------------- shapes and dtypes of results
@case
def calls_that_look_alike():
    """Each call twice, beside calls that differ from it in one thing that changes the result's shape or dtype."""
    whole, half = torch.arange(6).view(2, 3), torch.arange(6, dtype=torch.float16).view(2, 3)
    image = torch.arange(16.0).view(1, 1, 4, 4)
    calls = {
        "int + int": lambda to: to(whole) + 2,
        "int + float": lambda to: to(whole) + 2.5,
        "int + float tensor": lambda to: to(whole) + torch.tensor(2.5, dtype=torch.float64),
        "half * number": lambda to: to(half) * 2.5,
        "half * tensor without dimensions": lambda to: to(half) * torch.tensor(2.5),
        "half * tensor with one": lambda to: to(half) * to(torch.tensor([2.5])),
        "transposed": lambda to: to(half).t() * 2.5,
        "where with a number": lambda to: torch.where(to(whole) > 2, to(whole), 2.5),
        "where with a tensor": lambda to: torch.where(to(whole) > 2, to(whole), torch.tensor(2.5, dtype=torch.float64)),
        "rows": lambda to: to(whole).index_select(0, to(torch.tensor([1]))),
        "columns": lambda to: to(whole).index_select(1, to(torch.tensor([1]))),
        "quotient": lambda to: to(whole) / 2,
        "sum": lambda to: to(half).sum(),
        "sum of rows": lambda to: to(half).sum(0),
        "sum of columns": lambda to: to(half).sum(1),
        "sum that keeps": lambda to: to(half).sum(1, keepdim=True),
        "cat": lambda to: torch.cat([to(half), to(half)]),
        "cat of three": lambda to: torch.cat([to(half)] * 3),
        "cat beside": lambda to: torch.cat([to(half), to(half)], 1),
        "arange": lambda to: torch.arange(0.0, 3.0, 0.5, device=to(half).device),
        "longer arange": lambda to: torch.arange(0.0, 4.0, 0.5, device=to(half).device),
        "image": lambda to: nn.functional.interpolate(to(image), scale_factor=2.0),
        "larger image": lambda to: nn.functional.interpolate(to(image), scale_factor=2.5),
        "topk": lambda to: to(half).topk(1).values,
        "topk of two": lambda to: to(half).topk(2).values,
        "out that fits": lambda to: torch.add(to(half), 1, out=to(torch.zeros(2, 3, dtype=torch.float16))),
        "out that grows": lambda to: torch.add(to(half), 1, out=to(torch.zeros(0, dtype=torch.float16))),
    }
    wrong = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        for name, call in [*calls.items()] * 2:
            expected, got = call(lambda t: t), call(lambda t: t.cuda())
            same = (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
            if not same or not torch.equal(got.cpu(), expected):
                wrong.append(f"{name}, {dtype}")
    torch.set_default_dtype(torch.float32)
    return wrong


# ---------------------------------------------------------------- order between streams
@case
def read_before_write():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.fill_(1)  # LINE read_before_write earlier
    return values.sum().item()  # LINE read_before_write later


@case
def write_after_read():
    side = torch.cuda.Stream()
    values = ones(SIZE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = values.sum()  # LINE write_after_read earlier
    values.zero_()  # LINE write_after_read later
    torch.cuda.synchronize()
    return total.item() == SIZE or None


@case
def write_after_write():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.fill_(1)  # LINE write_after_write earlier
    values.fill_(2)  # LINE write_after_write later
    torch.cuda.synchronize()


@case
def waits_right():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.fill_(1)
    torch.cuda.current_stream().wait_stream(side)
    return values.sum().item()


@case
def event_recorded_too_early():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        event = side.record_event()
        values.fill_(1)
    torch.cuda.current_stream().wait_event(event)
    values.add_(1)
    torch.cuda.synchronize()


@case
def host_wait_orders_too():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.fill_(3)
    side.synchronize()
    return values.mean().item()


@case
def waits_of_threads():
    values = torch.ones(8, device="cuda", requires_grad=True)

    def read(times):
        for _ in range(times):
            values.sum().item()

    reader = threading.Thread(target=read, args=(2,), name="reader")
    reader.start()
    reader.join()
    read(1)
    doubled = values * 2
    doubled.register_hook(lambda gradient: gradient.sum().item() * gradient)  # in backward's thread
    doubled.sum().backward()


@case
def polled_event_orders_too():
    side = torch.cuda.Stream()
    values = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        values.fill_(3)
        event = side.record_event()
    while not event.query():
        pass
    return values.mean().item()


@case
def interleaved_columns_on_two_streams():
    side = torch.cuda.Stream()
    table = torch.zeros(64, 8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table[:, :4].fill_(1)
    table[:, 4:].fill_(2)
    torch.cuda.synchronize()
    return table.sum().item()


@case
def overlapping_columns_on_two_streams():
    side = torch.cuda.Stream()
    table = torch.zeros(64, 8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        table[:, :5].fill_(1)
    table[:, 4:].fill_(2)
    torch.cuda.synchronize()


@case
def columns_then_all_with_one_wait():
    """A later write of other columns must not hide the write that nobody waits for."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    table = torch.zeros(64, 8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        table[:, :4].fill_(1)
    with torch.cuda.stream(second):
        table[:, 4:].fill_(2)
    torch.cuda.current_stream().wait_stream(second)
    total = table.sum()
    torch.cuda.synchronize()
    del total


@case
def wrong_devices_stream():
    """The lane of cuda:1 waits for the current stream, which is cuda:0's."""
    side = torch.cuda.Stream(device=1)
    values = torch.zeros(SIZE, device="cuda:1")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.add_(1)
    torch.cuda.synchronize(1)


@case
def right_devices_stream():
    side = torch.cuda.Stream(device=1)
    values = torch.zeros(SIZE, device="cuda:1")
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        values.add_(1)
    torch.cuda.synchronize(1)
    return values.sum().item()


@case
def copy_between_devices():
    values = ones(SIZE) * 3
    return values.to("cuda:1").sum().item(), str(values.to("cuda:1").device)


# ---------------------------------------------------------------- memory
def _freed_while_a_side_stream_reads(record):
    side = torch.cuda.Stream()
    source = ones(SIZE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = source * 2
    if record:
        source.record_stream(side)
    del source
    reused = torch.zeros(SIZE, device="cuda")  # may get the memory of `source`
    torch.cuda.current_stream().wait_stream(side)
    del reused
    return doubled.sum().item() == 2 * SIZE or None


@case
def freed_in_use():
    return _freed_while_a_side_stream_reads(record=False) and None


@case
def freed_in_use_recorded():
    return _freed_while_a_side_stream_reads(record=True)


@case
def made_aside_freed_early():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source = ones(SIZE)
    torch.cuda.current_stream().wait_stream(side)
    tripled = source * 3
    del source
    with torch.cuda.stream(side):
        reused = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    del reused, tripled


@case
def out_of_memory():
    try:
        torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error)[:30], torch.cuda.memory_stats()["num_ooms"] > 0


@case
def fresh_memory_is_nan():
    return torch.empty(8, device="cuda").isnan().all().item()


@case
def counters():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated() - before
    del values
    stats = torch.cuda.memory_stats()
    keys = ("allocated_bytes.all.current", "reserved_bytes.large_pool.peak", "active.all.peak", "segment.all.current")
    keys += (
        "inactive_split_bytes.all.current",
        "requested_bytes.all.allocated",
        "num_alloc_retries",
        "num_device_alloc",
    )
    return (
        held == 3 << 20,
        torch.cuda.max_memory_allocated() - before >= 3 << 20,
        torch.cuda.memory_reserved() >= 20 << 20,
        [key for key in keys if key not in stats],
        "Allocated memory" in torch.cuda.memory_summary(),
        torch.cuda.mem_get_info()[1] == 256 << 20,
    )


@case
def storage_resize():
    values = ones(1 << 20)
    values.untyped_storage().resize_(0)
    empty = values.untyped_storage().nbytes()
    values.untyped_storage().resize_(4 << 20)
    values.fill_(2)
    return empty, values.mean().item()


# ---------------------------------------------------------------- copies and the host
@case
def early_read_of_pinned():
    copied = ones(SIZE).to("cpu", non_blocking=True)
    value = copied.sum().item()  # LINE early_read_of_pinned later
    torch.cuda.synchronize()
    return value == SIZE or None


@case
def early_read_by_numpy():
    copied = ones(SIZE).to("cpu", non_blocking=True)
    value = copied.numpy().sum()
    torch.cuda.synchronize()
    del value


@case
def early_read_of_a_small_one():
    copied = ones(3).to("cpu", non_blocking=True)
    value = copied[0].item()
    torch.cuda.synchronize()
    del value


@case
def read_behind_an_event():
    copied = ones(SIZE).to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    return copied.sum().item(), copied.numpy().max().item()


@case
def early_write_of_pinned():
    source = torch.ones(SIZE, pin_memory=True)
    copied = source.to("cuda", non_blocking=True)
    source.zero_()  # LINE early_write_of_pinned later
    torch.cuda.synchronize()
    del copied


@case
def reading_a_source_is_right():
    source = torch.ones(SIZE, pin_memory=True)
    copied = source.to("cuda", non_blocking=True)
    total = source.sum().item()
    return total, copied.sum().item()


@case
def neighbour_of_a_copy_is_free():
    """Another part of the same pinned block, on the same page too, may be used while a part is copied."""
    block = torch.zeros(5000, pin_memory=True)
    block[1000:2500].copy_(ones(1500), non_blocking=True)
    block[:1000].fill_(4)
    block[2500:].fill_(5)
    torch.cuda.synchronize()
    return block[:1000].mean().item(), block[1000:2500].mean().item(), block[2500:].mean().item()


@case
def pinned_freed_and_made_again():
    total = 0
    for number in range(20):
        source = torch.full((SIZE,), float(number), pin_memory=True)
        total = total + source.to("cuda", non_blocking=True)[0]
        del source
    return total.item()


@case
def pinned_read_and_written_on_one_stream():
    """Nothing is read too early: the copy from the pinned memory is launched before the one to it, and runs before."""
    host, side = torch.ones(SIZE, pin_memory=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            there = host.to("cuda", non_blocking=True)
            host.copy_(there.add_(2.0), non_blocking=True)
    side.synchronize()
    return [host.min().item(), host.max().item()]


@case
def two_streams_use_a_pinned_block():
    side = torch.cuda.Stream()
    host = torch.zeros(SIZE, pin_memory=True)
    values = ones(SIZE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        host.copy_(values, non_blocking=True)
    values.copy_(host, non_blocking=True)
    torch.cuda.synchronize()


@case
def registered_memory_too_early():
    host = torch.zeros(SIZE)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(ones(SIZE), non_blocking=True)
    total = host.sum()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    del total


@case
def registered_memory_waited_for():
    host = torch.zeros(SIZE)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(ones(SIZE), non_blocking=True)
    torch.cuda.synchronize()
    total = host.sum().item()
    pinned = host.is_pinned()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return total, pinned


@case
def native_read_too_early():
    host = torch.zeros(SIZE)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(ones(SIZE), non_blocking=True)  # LINE native_read_too_early earlier
    dsx_simcuda.host_reads(host, by="file writer")  # LINE native_read_too_early later
    ctypes.string_at(host.data_ptr(), host.nbytes)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


@case
def native_write_too_early():
    host = torch.ones(SIZE).pin_memory()
    host.to("cuda", non_blocking=True)  # LINE native_write_too_early earlier
    dsx_simcuda.host_writes(host[:10])  # LINE native_write_too_early later
    torch.cuda.synchronize()


@case
def native_system_call_too_early():
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(ones(SIZE), non_blocking=True)
    dsx_simcuda.host_reads(host)
    with open(os.devnull, "wb", buffering=0) as file:
        file.write(memoryview(host.numpy()))
    torch.cuda.synchronize()


@case
def native_accesses_in_time():
    host = torch.ones(SIZE).pin_memory()
    dsx_simcuda.host_writes(host)
    values = host.to("cuda", non_blocking=True)
    dsx_simcuda.host_reads(host)  # the copy reads, too
    torch.cuda.synchronize()
    dsx_simcuda.host_writes(host)
    host.copy_(values * 2, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    dsx_simcuda.host_reads(host[:1], by="file writer")
    dsx_simcuda.host_reads(torch.zeros(3))
    try:
        dsx_simcuda.host_reads(values)
    except ValueError as error:
        return host.sum().item(), str(error)


@case
def pageable_source_may_change():
    source = torch.ones(SIZE)
    copied = source.to("cuda", non_blocking=True)
    source.zero_()
    return copied.sum().item()


@case
def mixed_devices():
    try:
        ones(3) + torch.ones(3)
    except RuntimeError as error:
        return "same device" in str(error)


# ---------------------------------------------------------------- waits of the host
@case
def waits_are_counted():
    values = ones(8)
    values.sum().item()
    values.cpu()
    values.nonzero()
    torch.cuda.synchronize()
    (values > 0).any().tolist()


@case
def no_wait():
    values = randn(64, 64)
    (values @ values).relu().sum(0).softmax(0)
    torch.ones(4, pin_memory=True).to("cuda", non_blocking=True)
    nn.functional.scaled_dot_product_attention(*(randn(1, 2, 8, 4) for _ in range(3)), is_causal=True)
    one_hot = torch.zeros(4, device="cuda").scatter_add_(0, torch.arange(4, device="cuda"), ones(4))
    del one_hot


@case
def sync_debug_mode():
    torch.cuda.set_sync_debug_mode("error")
    try:
        ones(1).item()
        return "nothing"
    except RuntimeError as error:
        return str(error)[:43]
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- what of torch works
@case
def random_state():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = randn(4)
    torch.cuda.set_rng_state(state)
    again = randn(4)
    generator = torch.Generator("cuda").manual_seed(5)
    a, b = randn(4, generator=generator), randn(4, generator=torch.Generator("cuda").manual_seed(5))
    dropped = nn.functional.dropout(ones(1000), 0.5).mean().item()
    same = (first == again).all().item() and (a == b).all().item()
    return same, 0.7 < dropped < 1.3, torch.cuda.initial_seed()


@case
def wrong_generator():
    try:
        randn(3, generator=torch.Generator())
    except RuntimeError as error:
        return "generator" in str(error)


@case
def save_and_load():
    file = io.BytesIO()
    torch.save({"a": torch.arange(3, device="cuda")}, file)
    file.seek(0)
    on_device = torch.load(file)["a"].device
    return str(on_device), torch.load(io.BytesIO(file.getvalue()), map_location="cpu")["a"].tolist()


@case
def deepcopies():
    return str(copy.deepcopy(ones(3)).device), str(next(copy.deepcopy(nn.Linear(2, 2).cuda()).parameters()).device)


@case
def indexing():
    values = torch.arange(4, device="cuda")
    mask = torch.tensor([True, False, True, False], device="cuda")
    return (
        values[mask].tolist(),
        values.bincount().tolist(),
        randn(9).topk(2)[1].shape[0],
        values.flip(0).sort()[0].tolist(),
    )


@case
def conjugated_and_negated_views():
    """torch keeps a bit instead of changing the bytes; kernels and copies have to see it."""
    values = torch.randn(3, 4, dtype=torch.complex64)
    there, right = values.cuda(), []
    for function in (
        lambda t: t.conj().clone(),
        lambda t: t.conj() * 2,
        lambda t: t.mH @ t,
        lambda t: t.conj().imag.clone(),
        lambda t: t.conj().imag.sum(),
        lambda t: t.conj()[1, 1],
    ):
        right.append(torch.allclose(function(there).cpu(), function(values)))
    written, read = torch.zeros_like(there), torch.zeros_like(values)
    written.conj().copy_(values)
    read.conj().copy_(there)
    right += [torch.equal(written.cpu(), values.conj()), torch.equal(read, values.conj())]
    angles, gradients = torch.randn(4, dtype=torch.complex64), []
    for device in ("cpu", "cuda"):
        turned = torch.ones(2, 4, 2).to(device).requires_grad_()
        torch.view_as_real(torch.view_as_complex(turned) * angles.to(device)).square().sum().backward()
        gradients.append(turned.grad.cpu())
    return [*right, torch.allclose(*gradients)]


@case
def layers():
    query, key, value = (randn(1, 2, 8, 4) for _ in range(3))
    parts = [
        nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True),
        nn.Conv2d(3, 4, 3).cuda()(randn(1, 3, 8, 8)),
        nn.Sequential(nn.BatchNorm2d(3), nn.MaxPool2d(2)).cuda()(randn(2, 3, 8, 8)),
        nn.RNN(4, 4).cuda()(randn(3, 2, 4))[0],
        nn.Embedding(4, 3).cuda()(torch.arange(4, device="cuda")),
        nn.TransformerEncoderLayer(8, 2, batch_first=True).cuda()(randn(2, 3, 8)),
    ]
    return [part.isfinite().all().item() for part in parts]


def _trained(recurrent, options, device):
    torch.manual_seed(0)
    layer, inputs = recurrent(5, 7, **options).double().to(device), torch.randn(4, 3, 5).double().to(device)
    inputs.requires_grad_()
    outputs, state = layer(inputs)
    (outputs.square().sum() + (state[1] if isinstance(state, tuple) else state).sin().sum()).backward()
    return [t.cpu() for t in (outputs.detach(), inputs.grad, *(p.grad for p in layer.parameters()))]


INDICES, VALUES = [[0, 2, 2], [1, 0, 0]], [1.0, 2.0, 3.0]


def _sparse(device="cuda"):
    return torch.sparse_coo_tensor(INDICES, VALUES, (3, 2), device=device, check_invariants=True)


@case
def sparse_tensors():
    here, there = _sparse(), _sparse("cpu")
    packed = here.coalesce()
    assert (packed.indices().tolist(), packed.values().tolist()) == ([[0, 2], [1, 0]], [1.0, 5.0])
    changed, dense = here.clone(), torch.ones(3, 2, device="cuda")
    changed.mul_(2).add_(here)  # the second one has more values than there was room for
    file = io.BytesIO()
    torch.save(here, file)
    file.seek(0)
    equal = [
        torch.equal(found.to_dense().cpu(), wanted.to_dense())
        for found, wanted in [
            (here, there),
            (here + here, there + there),
            (changed, there * 3),
            (there.cuda(), there),
            (here.t(), there.t()),
            (here.half().float() / 2, there / 2),
            (torch.cat([here, here]), torch.cat([there, there])),
            (torch.eye(3, device="cuda").to_sparse(), torch.eye(3)),
            (torch.load(file), there),
            (_sparse("cuda:1").to("cuda:0"), there),
        ]
    ]
    sums = [torch.sparse.mm(here, torch.ones(2, 1, device="cuda")).sum().item(), torch.sparse.sum(here).item()]
    return all(equal), sums, dense.add_(here, alpha=2).tolist(), [str(packed.values().device), here.is_coalesced()]


@case
def what_sparse_tensors_lack_is_named():
    said = []
    for wrong in (
        lambda: _sparse().cumsum(0),
        lambda: torch.eye(3, device="cuda").to_sparse_csr(),
        lambda: torch.ones(3, 2) + _sparse(),
        lambda: torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (3,), device="cuda", check_invariants=True),
    ):
        try:
            wrong()
        except (NotImplementedError, RuntimeError) as error:
            said.append(str(error))
    names = ["aten::cumsum for sparse tensors", "layout SparseCsr", "one is on cuda:0 and one on cpu", "found index 5"]
    return [name in text for name, text in zip(names, said)]


@case
def sparse_gradients_of_an_embedding():
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True).to(device)
        optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.1), torch.optim.SGD(table.parameters(), lr=0.1)]
        for step in range(3):
            for power in (2, 3):  # the gradients are added
                (table(torch.tensor([1, 3, 3, step], device=device)) ** power).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False) if step else optimizer.zero_grad()
                (table(torch.tensor([2], device=device)) ** 2).sum().backward()
        weights.append(table.weight.detach().cpu())
    return torch.allclose(*weights)


@case
def sparse_values_on_two_streams():
    side = torch.cuda.Stream()
    gradient = _sparse()
    gradient._values().mul_(2)  # LINE sparse_values_on_two_streams earlier
    with torch.cuda.stream(side):
        total = torch.ones(3, 2, device="cuda")
        total.add_(gradient)  # LINE sparse_values_on_two_streams later
    torch.cuda.current_stream().wait_stream(side)


@case
def recurrent_layers():
    options = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
    cases = [(kind, some) for kind in (nn.LSTM, nn.GRU, nn.RNN) for some in options] + [(nn.LSTM, {"proj_size": 3})]
    equal = [
        all(torch.allclose(a, b) for a, b in zip(*(_trained(*one, device) for device in ("cpu", "cuda"))))
        for one in cases
    ]
    packed = nn.utils.rnn.pack_sequence([randn(4, 5), randn(2, 5)])
    with torch.autocast("cuda", torch.bfloat16):
        kind = nn.LSTM(5, 7).cuda()(packed)[0].data.dtype
    return equal, str(kind), str(nn.GRUCell(5, 7).cuda().half()(randn(3, 5).half()).dtype)


def _steps(optimizer_class, device, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1)).to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        loss = model(torch.randn(16, 4, generator=generator).to(device)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@case
def optimizers():
    kinds = [(torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})]
    kinds += [(torch.optim.Adam, {"foreach": False}), (torch.optim.Adagrad, {})]
    return [abs(_steps(kind, "cuda", **o) - _steps(kind, "cpu", **o)) < 1e-5 for kind, o in kinds]


@case
def mixed_precision():
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(randn(2, 4))
    scaler.scale(out.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    half = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).cuda().half()
    half(randn(2, 8).half()).sum().backward()
    return str(out.dtype), scaler.get_scale(), half[0].weight.grad.isfinite().all().item()


@case
def events_and_streams():
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(15_000_000)
    end.record()
    end.synchronize()
    high = torch.cuda.Stream(priority=-1)
    try:
        begin.elapsed_time(torch.cuda.Event())
        refused = False
    except RuntimeError:
        refused = True
    return begin.elapsed_time(end) >= 9, high.priority, torch.cuda.Stream().priority, high.query(), refused


@case
def profiler_ranges():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("mine"):
            ones(3).sum().item()
    with torch.cuda.nvtx.range("a"), torch.autograd.profiler.record_function("b"):
        ones(3)
    torch.cuda.nvtx.range_push("c")
    return "mine" in profile.key_averages().table(), torch.cuda.nvtx.range_pop()


@case
def refusals():
    from torch.utils import cpp_extension  # noqa: F401

    said = []
    attempts = [
        torch.cuda.CUDAGraph,
        lambda: torch.cuda.graph(None),
        lambda: torch.cuda.make_graphed_callables(None, ()),
        torch.cuda.MemPool,
        lambda: torch.cuda.Event(interprocess=True),
        lambda: torch.cuda.cudart().cudaMalloc(1),
        lambda: torch.ops.aten._efficient_attention_forward(
            ones(1, 2, 1, 8), ones(1, 2, 1, 8), ones(1, 2, 1, 8), None, None, None, None, None, 0.0, 0
        ),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except NotImplementedError as error:
            said.append(str(error))
    return said


@case
def inductor_is_refused():
    try:
        torch.compile(lambda x: x * 2)(ones(3))
    except Exception as error:
        return "use backend='aot_eager'" in str(error)


@case
def names_in_reports():
    model = nn.Linear(300, 300).cuda()
    dsx_simcuda.name_tensors(model, "model.")
    side = torch.cuda.Stream()
    dsx_simcuda.name_stream(side, "updates")
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.no_grad():
        model.weight.add_(1)
    model(ones(2, 300))
    torch.cuda.synchronize()


@case
def race_in_backward():
    side = torch.cuda.Stream()
    weight = ones(SIZE).requires_grad_()
    loss = (weight * weight).sum()  # LINE race_in_backward forward
    side.wait_stream(torch.cuda.current_stream())
    loss.backward()
    with torch.cuda.stream(side), torch.no_grad():
        weight.grad.zero_()
    torch.cuda.synchronize()


@case
def intervals_are_pruned():
    from dsx_simcuda import native

    table = torch.zeros(1500, 8, device="cuda")
    most = 0
    for column in range(8):
        for row in range(1500):
            table[row, column].fill_(1)
        most = max(most, native.lib.sim_intervals())
        torch.cuda.synchronize()
    return most


def main():
    torch.manual_seed(0)
    chosen = sys.argv[2:] or list(CASES)
    found = {}
    for name in chosen:
        with dsx_simcuda.watch() as seen:
            try:
                result = CASES[name]()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        syncs = sum(seen.host_syncs.values())
        torch.cuda.synchronize()  # what one case has left unordered is not to show in the next one
        torch.cuda.synchronize(1)
        found[name] = {
            "result": result,
            "syncs": syncs,
            "threads": Counter(sync.thread for sync in seen.host_syncs.elements()),
            "reports": [report.as_dict() for report in seen.reports],
            "texts": [str(report) for report in seen.reports],
        }
    with open(sys.argv[1], "w") as file:
        json.dump(found, file, default=str)


if __name__ == "__main__":
    main()
