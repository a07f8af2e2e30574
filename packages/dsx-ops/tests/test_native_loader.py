"""The loader of compiled modules that the build puts into every package with native code: one source, and what it
says.
"""

import hashlib
import importlib.util
import sys
import threading
import types
import warnings
from pathlib import Path

import pytest
from dsx_ops._native_loader import NativeLoader

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tools" / "native" / "loader.py"


@pytest.mark.skipif(not SOURCE.is_file(), reason="compares with the repository")
@pytest.mark.parametrize("package", ["dsx_ops", "dsx_comm", "dsx_nvme", "dsx_sparse_attn"])
def test_every_package_has_a_copy_of_the_one_source(package):
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    copy = Path(found.origin).with_name("_native_loader.py")
    same = hashlib.sha256(copy.read_bytes()).digest() == hashlib.sha256(SOURCE.read_bytes()).digest()
    assert same, f"{copy} is not tools/native/loader.py: install {package} again"


def put(monkeypatch, **attributes):
    """A module `made_up._C`; returns its loader's class arguments."""
    module = types.ModuleType("made_up._C")
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    monkeypatch.setitem(sys.modules, "made_up._C", module)
    return module


def refuse_isa():
    raise ValueError("instruction set 'sse9' cannot run here")


def test_what_keeps_a_module_from_running_is_a_sentence(monkeypatch):
    assert "made_up._C is not installed; install a C++ compiler" in NativeLoader("made_up._C", 1).why_not()
    module = put(monkeypatch, ABI=2)
    assert NativeLoader("made_up._C", 2).module() is module and NativeLoader("made_up._C", 2).why_not() == ""
    assert NativeLoader("made_up._C", 1).why_not() == "made_up._C has interface 2, expected 1: reinstall made-up"
    assert NativeLoader("made_up._C", 2, unfit=lambda: "wrong machine").why_not() == "wrong machine"
    assert NativeLoader("made_up._C", 2, refuse=lambda m: f"no driver for {m.ABI}").why_not() == "no driver for 2"
    monkeypatch.setenv("MADE_UP_NATIVE", "0")
    assert NativeLoader("made_up._C", 2).why_not() == "switched off by MADE_UP_NATIVE=0"


def test_an_instruction_set_that_cannot_run_warns(monkeypatch):
    put(monkeypatch, ABI=1, isa=refuse_isa)
    monkeypatch.setenv("DSX_ISA", "sse9")
    loader = NativeLoader("made_up._C", 1)
    with pytest.warns(RuntimeWarning, match="made-up runs without native code: DSX_ISA='sse9'"):
        assert loader.module() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "sse9" in loader.why_not()


def test_reference_only_hides_the_module_and_silences_warnings(monkeypatch):
    module = put(monkeypatch, ABI=1)
    loader = NativeLoader("made_up._C", 1)
    with loader.reference_only(), loader.reference_only(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.module() is None and loader.disabled
        assert loader.why_not() == "switched off by reference_only()"
        loader.warn_once("slow")
    assert loader.module() is module and not loader.disabled
    with pytest.warns(RuntimeWarning, match="slow"):
        loader.warn_once("slow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.warn_once("slow again")


def test_many_threads_look_once(monkeypatch):
    put(monkeypatch, ABI=1)
    asked = []
    loader = NativeLoader("made_up._C", 1, refuse=lambda m: asked.append(m) or "")
    threads = [threading.Thread(target=loader.module) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(asked) == 1
