"""The CUDA kernels ahead of any GPU: they compile for every architecture without spilling registers, with the registers
that the table in the repository says, and they move no byte twice.
"""

import subprocess

import pytest
import torch

SAMPLE = [("flat", 90), ("signs", 80), ("fused", 100)]


def compiled(resources, source, arch):
    compiler = resources.nvcc()
    if compiler is None:
        pytest.skip("needs nvcc (in CUDA_HOME/bin or on PATH)")
    path = resources.SOURCES / f"{source}.cu"
    try:
        return resources.measure(path, arch, compiler), resources.release(compiler)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{source}.cu does not compile for sm_{arch}:\n{error.stdout}{error.stderr}")


def check(resources, source, arch):
    found, release = compiled(resources, source, arch)
    assert found
    table_release, table = resources.read_table()
    known = {(r.source, r.kernel, r.arch): r for r in table}
    assert [r for r in found if r.spilled] == []
    assert {r.kernel for r in found} == {r.kernel for r in table if (r.source, r.arch) == (source, arch)}, (
        "kernels came or went: bench/cuda_kernels.py --write"
    )
    if release == table_release:  # another compiler gives other numbers
        more = [r for r in found if r.registers > known[r.source, r.kernel, r.arch].registers]
        assert more == [], "more registers than in the table"


@pytest.mark.parametrize(("source", "arch"), SAMPLE)
def test_kernels_compile_without_spills_within_the_tables_registers(resources, source, arch):
    check(resources, source, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_all_kernels_compile_without_spills_within_the_tables_registers(resources, arch):
    for path in resources.sources():
        check(resources, path.stem, arch)


def test_the_table_has_every_source_and_architecture_without_spills(resources):
    _, table = resources.read_table()
    wanted = {(path.stem, arch) for path in resources.sources() for arch in resources.ARCHS}
    assert {(r.source, r.arch) for r in table} == wanted
    assert [r for r in table if r.spilled] == []
    # A quarter of a multiprocessor's threads, with 16 bytes and more in flight each, is what the bandwidth needs.
    assert [r for r in table if r.occupancy() < 0.25 and r.threads > 32] == []


def test_the_document_says_what_the_table_says(resources):
    release, table = resources.read_table()
    text = (resources.SOURCES / "KERNELS.md").read_text()
    assert f"Compiled by nvcc {release}." in text
    for r in table:
        line = [x for x in text.splitlines() if x.startswith(f"| {r.source}: `{r.kernel}` | {r.threads} |")]
        assert len(line) == 1 and f"| {r.registers}, {r.occupancy():.0%}" in line[0], (r, line)


def test_occupancy_is_that_of_the_programming_guide(resources):
    def share(threads, registers, shared=0):
        return resources.Resources("", "", 90, threads, registers, shared, 0, 0).occupancy()

    assert share(512, 32) == 1.0
    assert share(512, 33) == 0.75  # 40 registers are given out
    assert share(256, 128) == 0.25
    assert share(128, 168) == 384 / 2048
    assert share(32, 32) == 0.5  # 32 blocks at most
    assert share(128, 32, 48 << 10) == 4 * 128 / 2048  # 228 KB, and 1 KB of the system's per block


def test_no_kernel_moves_a_byte_twice_or_asks_for_lanes_apart(traffic, emulator_module):
    """`moved` near `needed`: nothing else crosses memory. `asked` near it: one pass. `shared`: lanes are side by
    side.
    """
    # These read their input twice, and say why: the scale of all signs, groups beyond the registers.
    twice = {"compress_signs", "quantize int8, groups of 16384"}
    # A bias, a mask and a scale are read again and again, out of the cache.
    again = ("layer_norm", "bias_", "masked_", "requantize", "reduce_", "dequantize", "mean_of")
    for job in traffic.jobs(emulator_module, torch.bfloat16):
        t = traffic.measure(emulator_module, job)
        assert t.moved <= 1.35 * t.needed + 0.05, t
        if job.name not in twice and not any(part in job.name for part in again):
            assert t.asked <= 1.1 * t.needed + 0.05, t
        assert t.shared >= 0.45, t


def test_a_second_pass_and_lanes_that_are_apart_show(traffic, emulator_module):
    """The counts can fail: quantising a group beyond the registers asks for its input twice."""
    torch.manual_seed(0)
    found = {j.name: traffic.measure(emulator_module, j) for j in traffic._codes(emulator_module, torch.bfloat16)}
    once, twice = found["quantize int8, groups of 256"], found["quantize int8, groups of 16384"]
    assert twice.asked - once.asked > 1.9
    assert abs(twice.moved - once.moved) < 0.1
