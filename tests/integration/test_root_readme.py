"""The README's python runs as it stands, block by block; its install commands and verbs name what is there."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
sys.path.insert(0, str(ROOT / "ci"))
from workspace import all_packages, closure  # noqa: E402


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(number, tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def both_sides() -> tuple[str, str, int]:
    """The program before and after the README's diff, and how many lines the diff touches."""
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    lines = block.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] != "+")
    after = "\n".join(line[1:] for line in lines if line[:1] != "-")
    return before, after, sum(line[:1] in ("+", "-") for line in lines)


def test_the_diff_shards_a_plain_loop_and_keeps_its_loss(tmp_path):
    before, after, touched = both_sides()
    assert touched <= 10
    (tmp_path / "plain.py").write_text(before)
    (tmp_path / "train.py").write_text(after)
    launch = [sys.executable, "-m", "dsx", "launch", "--num_procs", "2", "train.py"]
    said = []
    for command in ([sys.executable, "plain.py"], [sys.executable, "train.py"], launch):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        said.append(set(re.findall(r"loss \d\.\d{4}", done.stdout)))
    assert all(len(losses) == 1 for losses in said), said


# A script of somebody who has read the README: another model, a loader, a schedule, clipping, printing at the end.
OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
tokens = torch.randint(0, 50, (40, 12), generator=torch.Generator().manual_seed(0))
for (batch,) in DataLoader(TensorDataset(tokens), batch_size=4):
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
"""


def changed_as_the_readme_says(script: str) -> str:
    """The README's additions in another script: its two imports, its call, its line for the optimizer."""
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    added = [line[1:] for line in block.splitlines() if line[:1] == "+"]
    imports, (start,) = added[:2], [line for line in added if "init_distributed" in line]
    (shard,) = [line for line in added if ".shard(" in line]
    script = script.replace("import torch\n", "\n".join([*imports, "import torch\n"]), 1)
    script = script.replace("torch.manual_seed", f"{start}\ntorch.manual_seed", 1)
    (settings,) = re.findall(r"function of the parameters: `(lambda p: torch.optim.SGD\(p, )lr=0.1\)`", README)
    mine = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    given = shard.replace("torch.optim.AdamW", f"{settings}lr=0.1, momentum=0.9)")
    return script.replace(f"optimizer = {mine}", given, 1)


def test_ones_own_script_is_sharded_by_ten_lines_and_in_three_minutes(tmp_path):
    sharded = changed_as_the_readme_says(OWN)
    touched = [line for line in difflib.ndiff(OWN.splitlines(), sharded.splitlines()) if line[:1] in "+-"]
    assert 4 <= len(touched) <= 10, touched
    # One write for each rank: print writes its parts one by one where nothing is buffered.
    show = "\nprint(f'divided {sum(optimizer.state_bytes().values())}\\n', end='')\n"
    (tmp_path / "plain.py").write_text(OWN)
    (tmp_path / "train.py").write_text(sharded + show)
    plain = subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    launch = [sys.executable, "-m", "dsx", "launch", "--num_procs", "2", "train.py"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    losses = set(re.findall(r"loss \d\.\d{4}", plain.stdout + done.stdout))
    assert len(losses) == 1 and done.stdout.count("loss ") == 2, (plain.stdout, done.stdout)
    held = [int(found) for found in re.findall(r"divided (\d+)", done.stdout)]
    whole = 4 * 3 * 29_138  # parameters, gradients and momentum of the whole model
    assert len(held) == 2 and all(size < 1.1 * whole for size in held), held


def test_the_first_screen_says_for_whom_and_shows_the_change():
    first = README.splitlines()[:40]
    assert any("choose dsx if" in line for line in first) and "```diff" in first
    assert any("no part of dsx has run on a GPU" in line for line in first)
    assert re.search(r"docs/assets/[\w-]+\.svg\)", README)


def test_install_commands_name_whole_closures():
    packages = all_packages()
    rows = re.findall(r"^\| (.*?) \| `pip install (.*?)` \|$", README, re.M)
    named = {what: [Path(part).name for part in paths.split()] for what, paths in rows}
    # dsx-compat brings a module called deepspeed, which only those get who ask for it
    assert set(named["everything"]) == set(closure("dsx", packages))
    for what, names in named.items():
        needed = {member for name in names for member in closure(name, packages)}
        assert set(names) == needed, f"{what}: pip would look for {sorted(needed - set(names))} in an index"


def test_commands_exist():
    sys.path.insert(0, str(ROOT / "tools"))
    from dev import VERBS

    for verb in re.findall(r"python3 tools/dev\.py (\w+)", README):
        assert verb in VERBS
