"""The package declares no numpy: saves, loads, exports and imports work where nobody has installed it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["numpy"] = None  # as where it is not installed: an import fails, torch's own too
import torch
from dsx_checkpoint import load_training, open_checkpoint, save_training
from dsx_checkpoint.behind import WriteBehind
from dsx_checkpoint.command import main

folder = sys.argv[1]


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = made()
model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
state = {"step": 1, "table": torch.arange(5), "empty": torch.empty(0)}
save_training(folder, "one", model, optimizer, state=state)
again, other = made()
loaded = load_training(folder, again, other)
assert loaded.state["table"].tolist() == [0, 1, 2, 3, 4] and loaded.state["empty"].numel() == 0
assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values()))
assert all(torch.equal(other.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])
           for p, q in zip(again.parameters(), model.parameters()))
assert torch.equal(open_checkpoint(folder).whole("0.weight"), model[0].weight)
torch.save({"model": model.state_dict()}, folder + "/plain.pt")
assert main(["verify", folder]) == 0
assert main(["export", folder, folder + "/exported"]) == 0
assert main(["import", folder + "/plain.pt", folder + "/imported"]) == 0
print("whole")
"""


def test_a_program_saves_loads_exports_and_imports(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("whole\n"), done.stdout + done.stderr
