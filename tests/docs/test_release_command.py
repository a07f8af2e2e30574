"""A release: what would stop it is said first, what is installed is what was built, and a changed file is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import release as releases  # noqa: E402
from alone import AloneError  # noqa: E402
from workspace import all_packages, load  # noqa: E402

needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def copy_of(name: str, tmp_path: Path):
    """A copy of a package, to be changed."""
    place = tmp_path / name
    shutil.copytree(all_packages()[name].path, place, ignore=shutil.ignore_patterns("tests", "*.so", "__pycache__"))
    return load(place)


def rehearsal(tmp_path: Path, *names: str, **options) -> releases.Release:
    packages = [all_packages()[name] for name in names]
    made = releases.Release(packages, tmp_path / "out", dry=True, **options)
    made.out.mkdir()
    made.work = tmp_path / "work"
    made.work.mkdir()
    return made


def test_an_undated_changelog_and_a_loose_sibling_stop_a_release(tmp_path):
    package = copy_of("dsx-comm", tmp_path)
    (package.path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n")
    text = (package.path / "pyproject.toml").read_text()
    (package.path / "pyproject.toml").write_text(text.replace('"dsx-core==0.1.0"', '"dsx-core>=0.1"'))
    release = releases.Release([all_packages()["dsx-core"], load(package.path)], tmp_path, dry=False, own_name=True)
    found = [line for line in releases.obstacles(release) if line.startswith("dsx-comm")]
    assert found == [
        "dsx-comm: CHANGELOG.md begins with '0.1.0 (unreleased)': write '0.1.0 (YYYY-MM-DD)'",
        "dsx-comm: asks for 'dsx-core>=0.1': write 'dsx-core==0.1.0'",
    ]
    with pytest.raises(AloneError, match="things stop the release"):
        releases.look(release)
    (package.path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-12-01)\n")
    (package.path / "pyproject.toml").write_text(text)
    release.packages[1] = load(package.path)
    assert not [line for line in releases.obstacles(release) if line.startswith("dsx-comm")]


@pytest.mark.parametrize(("options", "stopped"), [({}, True), ({"own_name": True}, False), ({"meta_name": "x"}, False)])
def test_the_name_of_a_stranger_stops_a_release(tmp_path, options, stopped):
    release = releases.Release([all_packages()["dsx"]], tmp_path, dry=False, **options)
    assert any("belongs to another project" in line for line in releases.obstacles(release)) is stopped


@needs_ssh_keygen
def test_what_is_built_installs_without_an_index_and_is_signed(tmp_path):
    pytest.importorskip("hatchling")
    release = rehearsal(tmp_path, "dsx-core")
    for target in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(release.out)]
        subprocess.run(command, cwd=release.packages[0].path, check=True, capture_output=True)
    releases.install(release)
    where = "import dsx_core; print(dsx_core.__file__)"
    seen = subprocess.run([releases.clean_python(release), "-c", where], cwd="/", capture_output=True, text=True)
    assert seen.stdout.startswith(str(tmp_path)), seen
    releases.sign(release)
    allowed = release.work / "allowed"
    releases.verify(release.out / "SHA256SUMS", allowed)
    assert len((release.out / "SHA256SUMS").read_text().splitlines()) == 2
    with open(release.files()[0], "ab") as changed:
        changed.write(b"!")
    with pytest.raises(AloneError, match="is not the file that was signed"):
        releases.verify(release.out / "SHA256SUMS", allowed)
    sums = release.out / "SHA256SUMS"
    sums.write_text(sums.read_text().replace("a", "b"))
    with pytest.raises(AloneError, match="signature does not fit"):
        releases.verify(sums, allowed)


def test_a_folder_with_older_files_is_refused(tmp_path):
    (tmp_path / "old.whl").touch()
    with pytest.raises(AloneError, match="is not empty"):
        releases.run(releases.Release([], tmp_path, dry=True))


def test_a_release_that_is_not_tested_is_refused(capsys):
    with pytest.raises(SystemExit):
        releases.main(["--without-tests"])
    assert "a release is tested" in capsys.readouterr().err
