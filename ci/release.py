"""A release as one command: everything is built, checked, installed, tested, listed and signed before one file leaves.

`python3 tools/dev.py release --dry-run` does all of it but the upload and the tag, and says what would stop a release.
Without the option the same stages run, and then the files go to the package index and the commit gets its tags. The
stages are the list `STAGES`; the first that fails ends the run, and nothing has left the machine then.

The folder of a release holds the wheels and source archives, `sbom.cdx.json` (CycloneDX: what an installation of all of
it consists of), `SHA256SUMS`, and `SHA256SUMS.sig`, a signature by an SSH key that `ssh-keygen -Y verify` checks.

What it leaves out: other systems than Linux, and accounts of the index: `twine` reads its own settings.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import wheels
from alone import TORCH, AloneError, call
from workspace import ROOT, Package, all_packages, load, requirement_name

NAMESPACE = "dsx-release"  # of the signature: one made for something else does not count
SIGNER = "release"


@dataclass
class Release:
    """What is released, from where, and to which folder."""

    packages: list[Package]
    out: Path
    dry: bool
    meta_name: str = "dsx"
    own_name: bool = False
    key: Path | None = None
    tests: bool = True
    work: Path = field(default_factory=Path)

    def renamed(self, package: Package) -> Package:
        """The package, or a copy of it that speaks of the other distribution name."""
        if self.meta_name == "dsx" or package.name not in ("dsx", "dsx-compat"):
            return package
        copy = self.work / "renamed" / "packages" / package.path.name
        return load(copy) if copy.exists() else wheels.renamed(package, self.meta_name, self.work / "renamed")

    def files(self) -> list[Path]:
        """Wheels and source archives, by name."""
        return sorted([*self.out.glob("*.whl"), *self.out.glob("*.tar.gz")])


def obstacles(release: Release) -> list[str]:
    """What speaks against a release of this checkout; each line says what to do."""
    found = []
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout.strip():
        found.append("the checkout has changes: commit them, so that the tag names what was released")
    versions = {package.name: package.version for package in release.packages}
    for package in release.packages:
        found += _obstacles_of(package, versions)
    if not release.own_name and release.meta_name == "dsx" and any(p.name == "dsx" for p in release.packages):
        found.append(
            "the name dsx on the package index belongs to another project: give --meta-name NAME, or --own-name once "
            "it is ours"
        )
    if release.key is None:
        found.append("no key signs the files: give --key FILE, an SSH key")
    return found


def _obstacles_of(package: Package, versions: dict[str, str]) -> list[str]:
    """Of one package: its changelog, and the exact versions of its siblings."""
    found, version = [], versions[package.name]
    changelog = package.path / "CHANGELOG.md"
    heading = re.search(r"^## (.*)$", changelog.read_text(encoding="utf-8"), re.M) if changelog.is_file() else None
    if heading is None or not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading.group(1)):
        got = heading.group(1) if heading else "no heading"
        found.append(f"{package.name}: CHANGELOG.md begins with {got!r}: write '{version} (YYYY-MM-DD)'")
    for need in package.requires:
        name = requirement_name(need)
        if name in versions and f"=={versions[name]}" not in need.replace(" ", ""):
            found.append(f"{package.name}: asks for {need!r}: write '{name}=={versions[name]}'")
    return found


def look(release: Release) -> None:
    """Is this checkout ready? A dry run only says what it finds."""
    found = obstacles(release)
    for line in found:
        print(f"  {'would stop a release' if release.dry else 'stops the release'}: {line}", flush=True)
    if found and not release.dry:
        raise AloneError(f"{len(found)} things stop the release; they stand above")


def build(release: Release) -> None:
    """Source archives, and wheels for every Python on PATH."""
    for package in release.packages:
        source = release.renamed(package)
        call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", release.out, cwd=source.path)
    command = [sys.executable, ROOT / "ci" / "wheels.py", "--out", release.out, "--meta-name", release.meta_name]
    call(*command, *[package.name for package in release.packages])


def check(release: Release) -> None:
    """Metadata and long descriptions as the index wants them; a licence in every file."""
    call(sys.executable, "-m", "twine", "check", "--strict", *release.files())
    names = {path.name.split("-")[0].replace("_", "-") for path in release.files()}
    expected = {release.renamed(package).name for package in release.packages}
    if names != expected:
        raise AloneError(f"got files of {sorted(names)}, expected {sorted(expected)}")


def install(release: Release) -> None:
    """In an empty environment, ours from the folder alone: no index is asked for a name of ours."""
    python = clean_python(release)
    ours = {*all_packages(), release.meta_name}
    needs = {need for package in release.packages for need in package.requires if requirement_name(need) not in ours}
    others = sorted(need for need in needs if requirement_name(need) != "torch")
    if others or any(requirement_name(need) == "torch" for need in needs):
        call(python, "-m", "pip", "install", "-q", TORCH, *others)
    names = [f"{release.renamed(p).name}=={p.version}" for p in release.packages]
    call(python, "-m", "pip", "install", "-q", "--no-index", "--find-links", release.out, *names, cwd=release.work)
    call(python, "-m", "pip", "check")
    for package in release.packages:
        call(python, "-c", f"import {package.module}", cwd=release.work)


def clean_python(release: Release) -> Path:
    """The Python of the release's empty environment, which is made at the first call."""
    folder = release.work / "clean"
    if not folder.exists():
        venv.EnvBuilder(with_pip=True).create(folder)
    return folder / "bin" / "python"


def test_alone(release: Release) -> None:
    """Each package's tests with what it declares, from its source archive."""
    for package in release.packages if release.tests else ():
        call(sys.executable, ROOT / "ci" / "alone.py", package.name)


def list_parts(release: Release) -> None:
    """The bill of materials of the clean installation."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--of", "JSON"]
    call(*command, "-o", release.out / "sbom.cdx.json", clean_python(release))


def sign(release: Release) -> None:
    """`SHA256SUMS` and its signature, which is checked at once. A dry run without a key makes one for the rehearsal."""
    sums = release.out / "SHA256SUMS"
    files = [*release.files(), *release.out.glob("sbom.cdx.json")]
    sums.write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files))
    key = release.key
    if key is None:
        key = release.work / "rehearsal-key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rehearsal", "-f", key)
    signature = sums.with_name("SHA256SUMS.sig")
    signature.unlink(missing_ok=True)
    call("ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, sums)
    allowed = release.work / "allowed"
    allowed.write_text(f"{SIGNER} {Path(f'{key}.pub').read_text()}")
    verify(sums, allowed)


def verify(sums: Path, allowed: Path) -> None:
    """Raise unless `sums` is signed by a key in the file `allowed` and fits the files beside it."""
    command = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", SIGNER, "-n", NAMESPACE]
    with open(sums, "rb") as signed:
        done = subprocess.run([*command, "-s", f"{sums}.sig"], stdin=signed, capture_output=True, text=True)
    if done.returncode != 0:
        raise AloneError(f"{sums}: its signature does not fit: {done.stdout}{done.stderr}")
    for line in sums.read_text().splitlines():
        digest, name = line.split("  ", 1)
        if hashlib.sha256((sums.parent / name).read_bytes()).hexdigest() != digest:
            raise AloneError(f"{name} is not the file that was signed")


def publish(release: Release) -> None:
    """Upload, then a tag for each package: what the index refuses has no tag."""
    if release.dry:
        print(f"  dry run: nothing leaves this machine; the files are in {release.out}", flush=True)
        return
    call(sys.executable, "-m", "twine", "upload", "--non-interactive", *release.files())
    for package in release.packages:
        call("git", "tag", "-a", f"{package.name}-{package.version}", "-m", f"{package.name} {package.version}")


STAGES: list[tuple[str, Callable[[Release], None]]] = [
    ("is the checkout ready", look),
    ("build", build),
    ("check the metadata", check),
    ("install in an empty environment, ours without an index", install),
    ("test each package alone", test_alone),
    ("list what an installation consists of", list_parts),
    ("sign", sign),
    ("publish", publish),
]


def run(release: Release) -> None:
    """All stages in order. Raises `AloneError` at the first that fails."""
    if release.out.exists() and any(release.out.iterdir()):
        raise AloneError(f"{release.out} is not empty: remove it, so that no older file is signed")
    release.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dsx_release_") as work:
        release.work = Path(work)
        for name, stage in STAGES:
            print(f"[release] {name}", flush=True)
            stage(release)


def main(given: list[str] | None = None) -> int:
    """The command; exit code 1 where a stage failed."""
    parser = argparse.ArgumentParser(prog="tools/dev.py release", description=__doc__.split("\n\n")[0])
    parser.add_argument("packages", nargs="*", help="names of packages; none: all")
    parser.add_argument("--dry-run", action="store_true", help="everything but the upload and the tags")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", help="an empty folder for the files")
    parser.add_argument("--meta-name", default="dsx", help="another distribution name for the package dsx")
    parser.add_argument("--own-name", action="store_true", help="the name dsx on the index is ours")
    parser.add_argument("--key", type=Path, help="the SSH key that signs; its public half is beside it, with .pub")
    parser.add_argument("--without-tests", action="store_true", help="leave out the tests of each package alone")
    arguments = parser.parse_args(given)
    known = all_packages()
    unknown = [name for name in arguments.packages if name not in known]
    if unknown:
        parser.error(f"no package {unknown[0]!r}; there are {', '.join(known)}")
    if arguments.without_tests and not arguments.dry_run:
        parser.error("--without-tests is for dry runs: a release is tested")
    if shutil.which("ssh-keygen") is None:
        parser.error("ssh-keygen is not on PATH: install OpenSSH's client, which signs the files")
    chosen = [known[name] for name in arguments.packages or known]
    options = {"dry": arguments.dry_run, "meta_name": arguments.meta_name, "own_name": arguments.own_name}
    release = Release(chosen, arguments.out.resolve(), **options, key=arguments.key, tests=not arguments.without_tests)
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    try:
        run(release)
    except AloneError as error:
        print(f"[release] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
