"""Who takes part in a round: as many ranks as share the batch out; the others wait, and end with the training."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
from dsx import elasticity

CONFIG = {"elasticity": {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 4], "version": 0.1}}
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "DSX_ELASTIC_STANDBY",
    "CROSS_RANK",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what `join` sets is taken back
        monkeypatch.delenv(name)


def test_a_process_alone_is_a_world_of_its_own():
    assert elasticity.join(CONFIG) == elasticity.Membership(rank=0, world_size=1, standby=0, batch=24)


@pytest.mark.parametrize(
    "there, part", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 6), (7, 6), (11, 6), (12, 12), (40, 12)]
)
def test_as_many_ranks_take_part_as_share_the_batch_out(monkeypatch, there, part):
    monkeypatch.setenv("WORLD_SIZE", str(there))
    monkeypatch.setenv("RANK", "0")
    found = elasticity.join(CONFIG)
    assert (found.world_size, found.standby, os.environ["WORLD_SIZE"]) == (part, there - part, str(part))


def test_a_batch_that_no_number_of_these_ranks_shares_out_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    section = {**CONFIG["elasticity"], "min_gpus": 4}
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match=r"got 3 ranks; expected at least 4.*4, 6, 12"):
        elasticity.join({"elasticity": section})


def test_what_cannot_be_joined(monkeypatch, tmp_path):
    with pytest.raises(elasticity.ElasticityConfigError, match="without it"):
        elasticity.join({"elasticity": {"enabled": False}})
    with pytest.raises(ValueError, match=r"none\.json"):
        elasticity.join(str(tmp_path / "none.json"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(elasticity.ElasticityConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        elasticity.join(CONFIG)
    monkeypatch.setenv("CROSS_RANK", "0")  # dsx launch, which has one round
    assert elasticity.join(CONFIG).world_size == 1


SCRIPT = """
    import sys
    from dsx import elasticity
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [4], "version": 0.1}
    place = elasticity.join({"elasticity": section})
    import dsx, torch
    dsx.init_distributed()
    total = torch.ones(1)
    dsx.comm.all_reduce(total)
    print("rank", place.rank, "of", place.world_size, "sum", int(total), flush=True)
    if place.rank == 0:
        from dsx.elasticity.membership import announce_end
        announce_end()
    dsx.comm.barrier()
"""


def test_a_rank_too_many_waits_and_ends_with_the_others(tmp_path):
    """The batch of 8 is shared out by 1 or 2 ranks; two more wait."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name in VARIABLES[2:]:
        common.pop(name, None)
    ranks = [
        subprocess.Popen([sys.executable, str(script)], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    said = [[line for line in out.splitlines() if line.startswith("rank")] for out, _ in outputs]
    assert said == [["rank 0 of 2 sum 2"], ["rank 1 of 2 sum 2"], [], []]
    assert "2 of 4 ranks take part" in "".join(outputs[0])
    assert all(f"rank {rank} of 4 waits for the next round" in outputs[rank][1] for rank in (2, 3))
