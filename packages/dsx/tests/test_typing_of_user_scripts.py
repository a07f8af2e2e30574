"""What a type checker, and so an editor, says of a user's script: right code is clean, slips are errors."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("pyright", reason="the type checker is a tool of the workspace, not of the package")

HEAD = """
import torch
import dsx

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
engine, optimizer, loader, scheduler = dsx.initialize(model=model, training_data=data, config="dsx.json")
"""
RIGHT = (
    HEAD
    + """
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
path: str = engine.save_checkpoint("ckpt", tag="a")
rates: list[float] = engine.get_lr()
optimizer.zero_grad()
folder, state = engine.load_checkpoint("ckpt")
alone, *_ = dsx.initialize(model=model, config={})
steps: int = alone.global_steps
"""
)
SLIPS = {
    "engine.stepp()": "stepp",
    'engine.save_checkpoint("ckpt", taag="a")': "taag",
    "optimizer.zero_gradd()": "zero_gradd",
    "dsx.initialise(model=model)": "initialise",
    "dsx.initialize(modell=model)": "No overloads",
    "engine.step(1, 2)": "Expected",
}


def errors_in(folder, name, text):
    (folder / name).write_text(text)
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "typeCheckingMode": "basic"}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return [item for item in json.loads(done.stdout)["generalDiagnostics"] if item["severity"] == "error"]


def test_a_users_script_is_checked(tmp_path):
    """One run for all: starting the checker takes most of the time."""
    lines = RIGHT.count("\n")
    found = errors_in(tmp_path, "train.py", RIGHT + "\n".join(SLIPS) + "\n")
    by_line = {item["range"]["start"]["line"]: item["message"] for item in found}
    assert not {line: text for line, text in by_line.items() if line < lines}, by_line
    for number, (slip, word) in enumerate(SLIPS.items(), start=lines):
        assert word in by_line.get(number, ""), (slip, by_line.get(number))
