"""The package declares no numpy: training, checkpoints and pushes work on two ranks where nobody has installed it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["numpy"] = None  # as where it is not installed: an import fails, torch's own too
import dsx_comm
import dsx_zero
import torch

folder = sys.argv[1]


def made(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return dsx_zero.shard(model, lambda p: torch.optim.AdamW(p, lr=0.01), stage=stage)


dsx_comm.init_distributed()
model, optimizer = made(3)
mark = dsx_zero.export.WeightMark(optimizer)
for step in range(2):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step(max_norm=1.0)
    optimizer.zero_grad()
packet = dsx_zero.export.pack_changes(list(mark.changes()))
assert len(list(dsx_zero.export.unpack_changes(packet))) > 0
dsx_zero.save(folder, "two", model, optimizer, state={"step": 2})
before = dsx_zero.full_state_dict(optimizer, rank0_only=False)
again, other = made(1)
assert dsx_zero.load(folder, again, other).state == {"step": 2}
after = dsx_zero.full_state_dict(other, rank0_only=False)
assert all(torch.equal(after["model"][name], value) for name, value in before["model"].items())
print("whole")
"""


def test_two_ranks_train_save_and_load(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*words, str(program), str(tmp_path / "folder")], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("whole") == 2, done.stdout + done.stderr
