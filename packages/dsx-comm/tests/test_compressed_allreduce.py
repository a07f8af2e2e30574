"""`compressed_allreduce` under DeepSpeed's name and arguments: errors that the caller keeps, one scale over the padded
buffer.
"""

import dsx_comm
import pytest
import torch
from dsx_testkit import run_ranks


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0).double()


def simulate(values, worker, server, world):
    """The published algorithm in float64 over padded buffers; all lists are per rank."""
    padded, chunk = worker[0].numel(), server[0].numel()
    mean = torch.zeros(padded).double()
    for r in range(world):
        x = torch.zeros(padded).double()
        x[: values[r].numel()] = values[r].double()
        x += worker[r]
        sent = x.norm() / padded**0.5 * signs(x)
        worker[r] = x - sent
        mean += sent / world
    out = torch.zeros(padded).double()
    for r in range(world):
        part = slice(r * chunk, (r + 1) * chunk)
        x = mean[part] + server[r]
        out[part] = x.norm() / chunk**0.5 * signs(x)
        server[r] = x - out[part]
    return out


def run(rank, world, numel, padded, dtype):
    worker, server = torch.zeros(padded), torch.zeros(padded // world)
    found = []
    for step in range(4):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype).view(-1, 1)
        back = dsx_comm.compressed_allreduce(x, worker, server, rank)
        assert back is x and x.shape == (numel, 1) and x.dtype == dtype
        found.append((x.view(-1).clone(), worker.clone(), server.clone()))
    return found


@pytest.mark.parametrize(
    ("world", "numel", "padded", "dtype"),
    [(2, 60, 64, torch.float32), (3, 100, 120, torch.float32), (2, 16, 16, torch.float16), (4, 5, 32, torch.float32)],
)
def test_every_step_is_the_published_algorithm(world, numel, padded, dtype):
    got = run_ranks(run, world, numel, padded, dtype)
    worker = [torch.zeros(padded).double() for _ in range(world)]
    server = [torch.zeros(padded // world).double() for _ in range(world)]
    for step in range(4):
        values = [
            torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + r)).to(dtype) for r in range(world)
        ]
        want = simulate(values, worker, server, world)
        for r in range(world):
            x, own, chunk = got[r][step]
            tolerance = 2e-3 if dtype == torch.float16 else 1e-5
            torch.testing.assert_close(x.double(), want[:numel], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(own.double(), worker[r], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(chunk.double(), server[r], rtol=1e-4, atol=1e-5)
            assert torch.equal(x, got[0][step][0])


def wrong(rank, world):
    x = torch.ones(20)
    for worker, server, text in (
        (torch.zeros(30), torch.zeros(16), "worker error of 30 elements and a server error of 16, expected 2"),
        (torch.zeros(24), torch.zeros(12), "a multiple of 8"),
        (torch.zeros(16), torch.zeros(8), "buffer_m has 20 elements, expected at most the 16"),
        (torch.zeros(32, dtype=torch.float16), torch.zeros(16), "worker error: got torch.float16"),
    ):
        with pytest.raises(dsx_comm.errors.CommArgumentError, match=text):
            dsx_comm.compressed_allreduce(x, worker, server, rank)
    with pytest.raises(dsx_comm.errors.CommArgumentError, match="not contiguous"):
        dsx_comm.compressed_allreduce(torch.ones(40)[::2], torch.zeros(32), torch.zeros(16), rank)
    assert torch.equal(x, torch.ones(20))


def test_lengths_and_dtypes_that_do_not_fit():
    run_ranks(wrong, 2)
