"""The package itself: its README, its report, what happens without native code, and that importing is silent."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import dsx_ops
import pytest
import torch
from dsx_ops import native

README = Path(__file__).resolve().parents[1] / "README.md"


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_readme_example_trains():
    example, *more = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    scope = {}
    torch.manual_seed(0)
    exec(compile(example, str(README), "exec"), scope)
    first = (torch.nn.Linear(64, 8)(scope["x"]) - scope["y"]).square().mean()
    assert scope["loss"] < first
    for other in more:
        exec(compile(other, str(README), "exec"), {})


def test_readme_names_everything_public():
    text = README.read_text()
    hidden = {"Norm", "__version__", "native_status", "reference_only", "split_master", "join_master"}
    missing = [n for n in dsx_ops.__all__ if n not in text and n not in hidden and not n.endswith("Error")]
    assert not missing


def test_report_and_status_agree():
    code, out, err = python("import sys; sys.argv = ['x', '--json']; from dsx_ops.__main__ import main; main()")
    assert code == 0 and not err
    status = json.loads(out)
    assert status["native"] == (native.module() is not None)
    assert status["isa"] in [*status["isas"], None]
    assert status["native"] or status["reason"]


def test_report_says_what_is_missing():
    code, out, _ = python("from dsx_ops.__main__ import main; main()", DSX_OPS_NATIVE="0")
    assert code == 0 and "NO: switched off by DSX_OPS_NATIVE=0" in out


def test_import_is_silent_and_loads_nothing_native():
    code = (
        "import sys, dsx_ops; assert 'dsx_ops._C' not in sys.modules; import torch; assert not"
        " torch.cuda.is_initialized()"
    )
    assert python(code) == (0, "", "")


@pytest.mark.native
def test_instruction_set_is_chosen_by_the_environment():
    if native.module() is None:
        pytest.skip("needs the compiled module")
    query = "import dsx_ops; print(dsx_ops.native_status()['isa'])"
    for isa in native.module().isas():
        assert python(query, DSX_ISA=isa)[1].strip() == isa
    code, out, err = python(
        "import dsx_ops; s = dsx_ops.native_status(); print(s['native'], s['reason'])", DSX_ISA="sse9"
    )
    assert code == 0 and out.startswith("False") and "this CPU has: base" in out and "RuntimeWarning" in err


def test_large_updates_without_native_code_warn_once():
    code = (
        "import torch, dsx_ops\n"
        "for n in (10, 1 << 20, 1 << 20):\n"
        "    p = torch.nn.Parameter(torch.ones(n)); p.grad = torch.ones(n)\n"
        "    dsx_ops.FusedAdam([p]).step()\n"
    )
    returncode, _, err = python(code, DSX_OPS_NATIVE="0")
    assert returncode == 0 and err.count("RuntimeWarning") == 1 and "1048576 elements" in err


def test_small_updates_do_not_warn():
    with warnings.catch_warnings(), dsx_ops.reference_only():
        warnings.simplefilter("error")
        p = torch.nn.Parameter(torch.ones(10))
        p.grad = torch.ones(10)
        dsx_ops.FusedAdam([p]).step()


def test_training_does_not_import_the_compiler():
    """torch's own `add_param_group` imports `torch._dynamo`, which takes two seconds of each start."""
    code = (
        "import sys, torch, dsx_ops\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = dsx_ops.FusedAdam([weight], lr=0.1)\n"
        "weight.sum().backward(); optimizer.step()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "other = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer.add_param_group({'params': [other]})\n"
        "assert optimizer.param_groups[1]['lr'] == 0.1\n"
    )
    status, _, err = python(code)
    assert status == 0, err
