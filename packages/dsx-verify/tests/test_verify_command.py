"""The command: audits a script on one rank and on two, writes receipts, and says what is wrong with a question."""

import json
import subprocess
import sys

import pytest
from dsx_verify.command import main

SCRIPT = """
import torch
import torch.distributed as dist
from dsx_verify import Expected

def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def loss(model, batch):
    return model(batch).square().mean()

def audited():
    model = make_model()
    optimizer = make_optimizer(model.parameters())

    def step(micro_batches):
        optimizer.zero_grad()
        loss(model, micro_batches[0]).backward()
        if dist.is_initialized() and REDUCE:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= dist.get_world_size()
        optimizer.step()

    batches = lambda i: torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
    return dict(step=step, model=model, optimizer=optimizer, batches=batches,
                expected=Expected(make_model, make_optimizer, loss=loss))
"""


def test_a_right_script_gets_a_clean_receipt(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT.replace("REDUCE", "True"))
    receipt = tmp_path / "receipt.json"
    assert main([str(tmp_path / "train.py"), "--steps", "2", "--json", str(receipt)]) == 0
    assert "2 updates equal to plain torch" in capsys.readouterr().out
    told = json.loads(receipt.read_text())
    assert told["ok"] and told["steps"] == 2 and told["fault"] is None


def test_two_ranks_show_what_one_does_not(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("REDUCE", "False"))
    assert main([str(tmp_path / "train.py"), "--steps", "1"]) == 0
    words = [sys.executable, "-m", "dsx_verify", str(tmp_path / "train.py"), "--ranks", "2", "--html", "page.html"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "weight: missing reduction" in done.stdout
    assert "missing reduction" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "words, text",
    [(["none.py"], "no such script"), (["EMPTY"], "no function `audited`"), (["EMPTY", "--ranks", "0"], "at least 1")],
)
def test_wrong_questions_are_answered(words, text, tmp_path, capsys):
    (tmp_path / "empty.py").write_text("")
    assert main([str(tmp_path / "empty.py") if word == "EMPTY" else word for word in words]) == 2
    assert text in capsys.readouterr().err


def test_dsx_calls_it_by_its_own_name(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"], prog="dsx verify")
    assert "usage: dsx verify" in capsys.readouterr().out
