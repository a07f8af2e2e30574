"""The package itself: its README, its report, what happens without native code, and that importing is silent."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import dsx_sparse_attn
import pytest
from dsx_sparse_attn import native

README = Path(__file__).resolve().parents[1] / "README.md"


def python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def blocks(tag):
    """The README's code blocks of one kind."""
    found = re.findall(r"^```(\S*)\n(.*?)^```$", README.read_text(), re.S | re.M)
    assert {kind for kind, _ in found} <= {"python", "sh"}, "every block says what it is"
    return [body for kind, body in found if kind == tag]


def test_readme_examples_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.chdir(tmp_path)
    scope = {}
    for example in blocks("python"):
        exec(compile(example, str(README), "exec"), scope)
    assert scope["q"].grad is not None and (tmp_path / "layout.svg").is_file()
    assert all(p.grad is not None for p in scope["model"].parameters())
    printed = capsys.readouterr().out.strip()
    assert printed and f"print(layout)  # {printed}" in README.read_text(), "what the README says is printed"


def test_readme_commands_run(tmp_path):
    lines = [
        words for body in blocks("sh") for line in body.splitlines() if (words := shlex.split(line, comments=True))
    ]
    ours = [words for words in lines if words[:3] == ["python", "-m", "dsx_sparse_attn"]]
    assert len(ours) == 2
    for words in ours:
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "layout.svg").is_file()
    for words in lines:
        for file in (word for word in words if word.startswith("packages/dsx-sparse-attn/")):
            assert (README.parents[2] / file).is_file() or not (README.parents[2] / "packages").is_dir(), file
    extras = {extra for words in lines if words[0] == "pip" for extra in re.findall(r"\[(\w+)\]", words[-1])}
    assert extras == {"triton"} <= set(metadata("dsx-sparse-attn").get_all("Provides-Extra"))


def test_readme_density_is_one_draw_of_the_range_it_gives():
    (least, most), densities = (0.31, 0.36), []
    for seed in range(50):
        random.seed(seed)
        densities.append(dsx_sparse_attn.BigBirdSparsityConfig(num_heads=4, block=64).make_layout(1024).density)
    assert f"other seeds give {least} to {most}" in README.read_text()
    assert least <= min(densities) and max(densities) <= most, (min(densities), max(densities))


def test_readme_names_everything_public():
    text = README.read_text()
    missing = [n for n in dsx_sparse_attn.__all__ if n not in text and n != "__version__"]
    assert not missing


def test_report_and_status_agree():
    code, out, err = python("from dsx_sparse_attn.__main__ import main; main(['--json'])")
    assert code == 0 and not err
    status = json.loads(out)
    assert status["native"] == (native.module() is not None)
    assert status["backends"] == dsx_sparse_attn.backend_status()
    assert status["backends"]["native"] == native.missing() and status["backends"]["torch"] == ""
    assert status["isa"] in [*status["isas"], None] and (status["native"] or status["reason"])


def test_without_native_code_it_works_says_why_and_warns_once_when_that_is_slow():
    code = (
        "import torch, dsx_sparse_attn as s\n"
        "from dsx_sparse_attn.__main__ import main\n"
        "main([])\n"
        "for n in (64, 4096, 4096):\n"
        "    q = torch.zeros(1, 16, n, 8)\n"
        "    s.block_sparse_attention(q, q, q, torch.eye(n // 64, dtype=torch.long)[None], block=64)\n"
    )
    returncode, out, err = python(code, DSX_SPARSE_ATTN_NATIVE="0")
    assert returncode == 0 and "NO: switched off by DSX_SPARSE_ATTN_NATIVE=0" in out
    assert (
        "backend native      no: switched off by DSX_SPARSE_ATTN_NATIVE=0" in out and "backend torch       yes" in out
    )
    assert err.count("RuntimeWarning") == 1, err


def test_import_is_silent_and_loads_nothing_native():
    code = (
        "import sys, dsx_sparse_attn, torch\n"
        "late = {'dsx_sparse_attn._C', 'pydantic', 'triton', 'transformers', 'torch.nn.attention.flex_attention'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert python(code) == (0, "", "")


@pytest.mark.native
def test_instruction_set_is_chosen_by_the_environment():
    if native.module() is None:
        pytest.skip("needs the compiled module")
    query = "import dsx_sparse_attn; print(dsx_sparse_attn.native_status()['isa'])"
    assert python(query, DSX_ISA="base")[1].strip() == "base"
    code, out, err = python(
        "import dsx_sparse_attn as d; s = d.native_status(); print(s['native'], s['reason'])", DSX_ISA="sse9"
    )
    assert code == 0 and out.startswith("False") and "this CPU has: base" in out and "RuntimeWarning" in err
