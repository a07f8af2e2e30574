"""Which `deepspeed` a process imports. dsx's is found by name and by metadata, and is never mixed with another one's
files. If another one is installed, it comes first unless the program calls `activate`, and `dsx doctor` reports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dsx_compat
import pytest
from dsx_compat.activation import SITE

ENV = {k: v for k, v in os.environ.items() if k != "DSX_ALONE"}


def run(code: str, *paths: Path, check: bool = True) -> subprocess.CompletedProcess:
    """A new process with these folders at the end of `sys.path`, as site-packages would be."""
    body = f"import sys\nsys.path += {[str(path) for path in paths]!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, env=ENV, timeout=120)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def real(tmp_path):
    """A folder that looks like an installed DeepSpeed to import statements and to `importlib.metadata`."""
    place = tmp_path / "real"
    (place / "deepspeed").mkdir(parents=True)
    (place / "deepspeed" / "__init__.py").write_text("__version__ = '0.19.8'\n")
    info = place / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    (info / "RECORD").write_text("deepspeed/__init__.py,,\ndeepspeed-0.19.8.dist-info/METADATA,,\n")
    return place


CLEAN = "sys.path[:] = [p for p in sys.path if not p.endswith('_site')]\n"


def test_clients_find_module_version_and_distribution():
    code = """
import importlib.metadata as m, importlib.util, json
found = importlib.util.find_spec("deepspeed") is not None
print(json.dumps([found, m.version("deepspeed"), m.metadata("deepspeed")["Name"]]))
import deepspeed
assert deepspeed.__version__ == m.version("deepspeed")
"""
    found = json.loads(run(CLEAN + f"sys.path.append({str(SITE)!r})\n" + code).stdout)
    assert found == [True, dsx_compat.DEEPSPEED_VERSION, "deepspeed"]


def test_activate_wins_over_an_installed_one_in_this_process_only(real):
    code = "import dsx_compat; dsx_compat.activate(); dsx_compat.activate(); "
    code += "import deepspeed; print(deepspeed.__version__)"
    assert run(code, real).stdout.strip() == dsx_compat.DEEPSPEED_VERSION
    assert (
        run(f"sys.path.insert(0, {str(real)!r}); import deepspeed; print(deepspeed.__version__)").stdout.strip()
        == "0.19.8"
    )


def test_activate_after_another_one_was_imported_is_refused(real):
    code = f"sys.path.insert(0, {str(real)!r}); import deepspeed, dsx_compat; dsx_compat.activate()"
    done = run(code, check=False)
    assert done.returncode == 1
    assert "before the first import" in done.stderr and str(real) in done.stderr


def test_an_installed_deepspeed_comes_before_the_folder_in_our_pth_file(real):
    done = run(CLEAN + f"sys.path += [{str(real)!r}, {str(SITE)!r}]; import deepspeed; print(deepspeed.__version__)")
    assert done.stdout.strip() == "0.19.8"


def test_doctor_names_the_installed_deepspeed_and_the_command_that_removes_it(real):
    code = (
        CLEAN
        + f"""
sys.path += [{str(real)!r}, {str(SITE)!r}]
from dsx_compat.diagnosis import deepspeed_found
for finding in deepspeed_found(): print(finding.status, finding.value, finding.hint)
"""
    )
    text = run(code).stdout
    assert "warning" in text and "0.19.8" in text and str(real) in text and "pip uninstall -y deepspeed" in text


def test_doctor_finds_no_fault_without_another_deepspeed():
    code = (
        CLEAN
        + f"""
sys.path.append({str(SITE)!r})
from dsx_compat.diagnosis import deepspeed_found
print([finding.status for finding in deepspeed_found()])
"""
    )
    assert run(code).stdout.strip() == "['ok']"


def test_doctor_runs_the_probes_that_packages_bring(monkeypatch):
    from dsx import doctor
    from dsx_compat.diagnosis import deepspeed_found

    class Entry:
        def load(self):
            return deepspeed_found

    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [Entry()] if group == "dsx.doctor" else [])
    monkeypatch.setattr(doctor, "PROBES", ())
    assert [finding.topic for finding in doctor.examine()][:1] == ["compatibility"]


def test_files_of_another_installation_among_ours_stop_the_first_import(tmp_path):
    """Another installer has written into a copy of our folder: its RECORD lists the files as its own."""
    package = tmp_path / "copy" / "dsx_compat"
    shutil.copytree(Path(dsx_compat.__file__).parent, package)
    info = package / "_site" / "deepspeed-0.19.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    (info / "RECORD").write_text("deepspeed/__init__.py,,\n")
    code = f"sys.path.insert(0, {str(package.parent)!r}); import dsx_compat; dsx_compat.activate(); import deepspeed"
    done = run(code, check=False)
    assert done.returncode == 1
    assert "pip uninstall -y deepspeed dsx-compat" in done.stderr


def test_pip_can_replace_our_entry_by_the_real_deepspeed(tmp_path):
    """`pip install -U deepspeed` first uninstalls the entry it finds: ours. It has to find a list of files."""
    site = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(Path(dsx_compat.__file__).parent, site / "dsx_compat")
    (site / "dsx_compat.pth").write_text("dsx_compat/_site\n")
    (tmp_path / "pyvenv.cfg").write_text(
        f"home = {Path(sys.base_prefix) / 'bin'}\ninclude-system-site-packages = false\n"
    )
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    done = subprocess.run([*pip, "uninstall", "-y", "deepspeed"], capture_output=True, text=True, env=ENV, timeout=120)
    assert done.returncode == 0 and "Successfully uninstalled deepspeed" in done.stdout, done.stderr
    left = site / "dsx_compat" / "_site"
    assert (left / "deepspeed" / "__init__.py").exists() and not list(left.glob("deepspeed-*"))
    hint = f"""
import dsx_compat.activation as a
from pathlib import Path
a.SITE = Path({str(left)!r}); sys.path[:] = [p for p in sys.path if not p.endswith('_site')] + [{str(left)!r}]
import dsx_compat.diagnosis as d
d.SITE = a.SITE
print([(f.status, f.hint) for f in d.deepspeed_found()])
"""
    assert "warning" in run(hint).stdout and "--force-reinstall" in run(hint).stdout


def test_our_own_list_of_files_names_the_entry_alone():
    (info,) = SITE.glob("deepspeed-*.dist-info")
    named = {line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()}
    assert named == {f"{info.name}/{file.name}" for file in info.iterdir()}


def test_the_import_loads_no_heavy_part_of_dsx():
    code = """
import dsx_compat; dsx_compat.activate()
import deepspeed, deepspeed.runtime.zero.partition_parameters, deepspeed.launcher.runner
heavy = {"pydantic", "dsx_zero", "dsx_comm", "dsx.engine", "rich", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    run(code)


def test_metadata_and_module_have_the_same_version():
    (info,) = SITE.glob("deepspeed-*.dist-info")
    assert info.name == f"deepspeed-{dsx_compat.DEEPSPEED_VERSION}.dist-info"
    assert f"Version: {dsx_compat.DEEPSPEED_VERSION}\n" in (info / "METADATA").read_text()
