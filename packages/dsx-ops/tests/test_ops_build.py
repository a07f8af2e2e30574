"""The shared build hook, on a package of one small C++ file: what it builds, what it refuses, and what it says."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[3] / "tools" / "dsx_build.py"
NEEDED = ("hatchling", "pybind11", "ninja")
if not HOOK.is_file():
    pytest.skip("the hook is part of the repository, not of the wheel", allow_module_level=True)
if missing := [m for m in NEEDED if importlib.util.find_spec(m) is None]:
    pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)
if not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
    pytest.skip("needs a C++ compiler", allow_module_level=True)

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tiny-native"
version = "1.0"
[tool.hatch.build.targets.wheel]
packages = ["src/tiny_native"]
[tool.hatch.build.targets.sdist]
include = ["/src", "/native", "/hatch_build.py"]
[tool.hatch.build.hooks.custom]
package = "tiny_native"
module = "_C"
sources = ["native/bind.cpp"]
isa_sources = ["native/isa.cpp"]
"""
BIND = """
#include <Python.h>
#include "dsx_native/isa.h"
namespace base { int width(); }
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C(void) {
    PyObject* m = PyModule_Create(&def);
    PyModule_AddIntConstant(m, "ABI", 5);
    PyModule_AddIntConstant(m, "width", base::width());
    PyModule_AddIntConstant(m, "isas", static_cast<long>(dsx_native::runnable_isas()));
    return m;
}
"""
ISA = 'namespace DSX_ISA { __attribute__((visibility("hidden"))) int width() { return 7; } }\n'


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "repo" / "packages" / "tiny"
    (root / "native").mkdir(parents=True)
    (root / "src" / "tiny_native").mkdir(parents=True)
    (root / "src" / "tiny_native" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "native" / "bind.cpp").write_text(BIND)
    (root / "native" / "isa.cpp").write_text(ISA)
    shutil.copy(HOOK.parent.parent / "packages" / "dsx-ops" / "hatch_build.py", root)
    (tmp_path / "repo" / "tools").mkdir()
    shutil.copy(HOOK, tmp_path / "repo" / "tools")
    shutil.copytree(HOOK.parent / "native", tmp_path / "repo" / "tools" / "native")
    return root


def build(root, target="wheel", **environment):
    """Run hatchling; returns (exit code, text, files built)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DSX_BUILD") and k not in ("CXX", "CXXFLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(root / "dist")],
        cwd=root,
        env={**kept, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr, sorted((root / "dist").glob("*"))


def without_compiler(tmp_path):
    (tmp_path / "empty").mkdir(exist_ok=True)
    return {"PATH": str(tmp_path / "empty")}


def test_wheel_from_the_unpacked_sdist_loads(package, tmp_path):
    code, text, (archive,) = build(package, "sdist")
    assert code == 0, text
    with tarfile.open(archive) as tar:
        assert any(n.endswith("_build_support/dsx_build.py") for n in tar.getnames())
        assert any(n.endswith("_build_support/native/dsx_native/isa.h") for n in tar.getnames())
        tar.extractall(tmp_path / "elsewhere", filter="data")
    (source,) = (tmp_path / "elsewhere").iterdir()
    code, text, (wheel,) = build(source)
    assert code == 0, text
    assert "none-any" not in wheel.name
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    with zipfile.ZipFile(wheel) as z:
        assert sorted(n for n in z.namelist() if "dist-info" not in n) == [
            "tiny_native/_C" + name[2:],
            "tiny_native/__init__.py",
            "tiny_native/_native_loader.py",
        ]
        z.extractall(tmp_path / "site")
    query = (
        "from tiny_native._native_loader import NativeLoader; loader = NativeLoader('tiny_native._C', abi=5); "
        "print(loader.module().width)"
    )
    assert subprocess.check_output([sys.executable, "-c", query], cwd=tmp_path / "site", text=True).strip() == "7"


def test_a_second_build_compiles_nothing(package):
    assert build(package)[0] == 0
    objects = {p: p.stat().st_mtime_ns for p in package.glob("build/*/*.o")}
    assert len(objects) >= 2
    assert build(package)[0] == 0
    assert objects == {p: p.stat().st_mtime_ns for p in package.glob("build/*/*.o")}


def test_what_is_compiled_is_said_in_one_line(package):
    text = (package / "pyproject.toml").read_text()
    (package / "pyproject.toml").write_text(text + "seconds = 240\n")
    code, text, _ = build(package, MAX_JOBS="2")
    assert code == 0, text
    objects = len(list(package.glob("build/*/*.o")))
    (line,) = [x for x in text.splitlines() if "compiling" in x]
    assert f"tiny_native: compiling {objects} files with g++, 2 at a time; about 2 min on idle cores" in line
    code, text, _ = build(package)
    assert code == 0 and "compiling" not in text
    os.utime(package / "native" / "bind.cpp")
    code, text, _ = build(package)
    assert code == 0 and "compiling 1 file with" in text


def test_merged_sources_are_one_file_and_are_watched(package):
    """The files see each other's names; a change in one of them compiles the whole again."""
    text = (package / "pyproject.toml").read_text()
    text = text.replace('sources = ["native/bind.cpp"]', 'merged_sources = ["native/bind.cpp", "native/a_more.cpp"]', 1)
    (package / "pyproject.toml").write_text(text)
    more = package / "native" / "a_more.cpp"
    more.write_text("static int twice(int x) { return 2 * x; }\n")
    bind = package / "native" / "bind.cpp"
    bind.write_text(bind.read_text().replace("base::width());", "twice(base::width()));"))
    code, text, _ = build(package)
    assert code == 0, text
    (merged,) = package.glob("build/*/merged.o")
    before = merged.stat().st_mtime_ns
    more.write_text("static int twice(int x) { return x + x; }\n")
    assert build(package)[0] == 0
    assert merged.stat().st_mtime_ns > before


def test_no_compiler_gives_a_pure_wheel_and_says_so(package, tmp_path):
    code, text, (wheel,) = build(package, **without_compiler(tmp_path))
    assert code == 0, text
    assert wheel.name.endswith("py3-none-any.whl")
    assert "WITHOUT native code" in text and "install g++" in text
    with zipfile.ZipFile(wheel) as z:
        assert "tiny_native/_native_loader.py" in z.namelist()


def test_no_compiler_is_an_error_when_native_code_is_demanded(package, tmp_path):
    code, text, built = build(package, DSX_BUILD_NATIVE="1", **without_compiler(tmp_path))
    assert code != 0 and not built
    assert "no C++ compiler found (tried g++, clang++, c++)" in text and "DSX_BUILD_NATIVE=0" in text
    assert "[DSX602]" in text


def test_switched_off(package):
    code, text, (wheel,) = build(package, DSX_BUILD_NATIVE="0")
    assert code == 0 and wheel.name.endswith("py3-none-any.whl") and "WITHOUT" not in text


def test_a_failing_compiler_is_an_error_with_its_output(package):
    (package / "native" / "isa.cpp").write_text("this is not C++\n")
    code, text, built = build(package)
    assert code != 0 and not built
    assert "isa.cpp" in text and "error" in text and "DSX_BUILD_NATIVE=0" in text


@pytest.mark.parametrize("switch", ["DSX_BUILD_NATIVE", "DSX_BUILD_CUDA"])
def test_a_misspelt_switch_is_named(package, switch):
    if switch == "DSX_BUILD_CUDA":
        text = (package / "pyproject.toml").read_text()
        (package / "pyproject.toml").write_text(text + 'cuda_module = "_cuda"\ncuda_sources = []\n')
    code, text, _ = build(package, **{switch: "yes"})
    assert code != 0 and f"{switch}='yes': expected 0, 1 or auto" in text


def test_compiler_and_flags_of_the_environment(package):
    code, text, _ = build(package, CXX="g++-that-is-not-there", DSX_BUILD_NATIVE="1")
    assert code != 0 and "g++-that-is-not-there" in text
    (package / "native" / "isa.cpp").write_text("namespace DSX_ISA { int width() { return EXTRA; } }\n")
    code, text, built = build(package, CXXFLAGS="-DEXTRA=9")
    assert code == 0 and built, text
