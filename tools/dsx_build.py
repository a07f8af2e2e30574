"""The build hook of every dsx package with native code: compiles `native/` with ninja, without knowing torch.

The idea: hatchling builds the wheel; this hook adds one extension module to it. The hook writes a `build.ninja` by hand
(three rules) and runs the ninja of the build environment. Sources listed as `isa_sources` are compiled once per
instruction set, each time into a namespace of its own (`-DDSX_ISA=avx2`), so that one wheel serves every CPU and
chooses at run time. The sdist carries a copy of this file and of what packages share (`native/`: headers, and the
loader of the compiled module), so that it builds outside the repository; in the repository the packages find both here.
The loader (`native/loader.py`) becomes `_native_loader.py` of the package, with native code or without.

Configured in the package's `pyproject.toml`::

    [tool.hatch.build.hooks.custom]
    package = "dsx_ops"                    # import package that receives the module
    module = "_C"                          # name of the module
    merged_sources = ["native/bind/*.cpp"] # compiled as one file: pybind11's headers cost seconds
    sources = ["native/core/*.cpp"]        # compiled once, each by itself
    isa_sources = ["native/cpu/*.cpp"]     # compiled per instruction set
    include = ["native/include"]
    cuda_module = "_cuda"                  # optional second module, built by nvcc: CUDA trouble leaves the first alone
    cuda_sources = ["native/cuda/*.cu", "native/cuda/*.cpp"]
    seconds = 110                          # of one core, to compile the first module whole (it is said)
    cuda_seconds = 130                     # the same for the second

Switches of the environment:

    DSX_BUILD_NATIVE    0 never, 1 or fail, auto (default): when there is a C++ compiler
    DSX_BUILD_CUDA      0 never, 1 or fail, auto (default): when there are nvcc and a GPU
    DSX_CUDA_ARCHS      default "80;90;100" (what nvcc does not know is an error); PTX of the last one is added
    DSX_BUILD_JOBS      parallel compilations (else MAX_JOBS, else ninja's own choice)
    DSX_BUILD_SANITIZE  e.g. "address,undefined": an instrumented module in a build directory of its own
    CXX, CXXFLAGS (appended), CUDA_HOME

What is compiled, and for about how long, is said in one line before it begins (pip shows it with -v). No compiler in
`auto`: a pure wheel and a visible warning. A compiler that is there and fails is always an error with its output. What
it leaves out: Windows and MSVC; anything that would need torch's headers.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

X86_ISAS = {
    "base": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq",
}
# GCC 12 believes that its own AVX-512 intrinsics read variables before they are set (gcc.gnu.org/PR105593), thousands
# of lines of it.
QUIET = "-Wno-uninitialized -Wno-maybe-uninitialized"
# No contraction: a*b+c rounds twice everywhere, so every instruction set (and the PyTorch reference) gives the same
# bits.
CXX_FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra"
)
# Line numbers only: with variables (-g) or at -O2 the compiler takes many minutes for a file of instrumented vector
# code.
SANITIZE_FLAGS = "-g1 -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
OUTPUT_SHOWN = 6000
SHARED = Path(__file__).resolve().parent / "native"  # headers in dsx_native/, and:
LOADER, LOADER_IN_PACKAGE = SHARED / "loader.py", "_native_loader.py"


class NativeBuildError(RuntimeError):
    """The native part cannot be built; the text says what was tried and what to do."""


def switch(name: str) -> str:
    """`0`, `1` or `auto` from the environment."""
    value = os.environ.get(name, "auto").strip().lower() or "auto"
    if value not in ("0", "1", "auto"):
        raise NativeBuildError(f"{name}={value!r}: expected 0, 1 or auto")
    return value


def find_compiler() -> tuple[str | None, list[str]]:
    """The C++ compiler command, and what was tried."""
    tried = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for candidate in tried:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return candidate, tried
    return None, tried


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, else of PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    return Path(found) if found else None


def has_gpu() -> bool:
    """Whether an NVIDIA driver with a device is loaded; nothing is initialised."""
    devices = Path("/proc/driver/nvidia/gpus")
    return devices.is_dir() and any(devices.iterdir())


def cudart_folder(nvcc: Path) -> Path:
    """Where libcudart_static.a lies. nvcc on PATH may be a wrapper script far from its toolkit."""
    real = Path(os.path.realpath(nvcc)).parent.parent
    roots = [Path(r) for r in (os.environ.get("CUDA_HOME"), real, "/usr/local/cuda") if r]
    for folder in (root / part for root in roots for part in ("lib64", "lib", "targets/x86_64-linux/lib")):
        if (folder / "libcudart_static.a").is_file():
            return folder
    raise NativeBuildError(
        f"nvcc is {nvcc}, but libcudart_static.a was found under none of {', '.join(map(str, roots))}; "
        "set CUDA_HOME to the toolkit, or DSX_BUILD_CUDA=0 to build without CUDA"
    )


def quote(path: Path | str) -> str:
    """A path as ninja wants it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def replace_file(source: Path, target: Path) -> None:
    """Put a copy of `source` at `target` by rename: a running process may have the old file mapped."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)


@dataclass
class NinjaFile:
    """A `build.ninja` in the making, in one build directory."""

    root: Path
    folder: Path
    includes: list[str]
    cxx: str

    def __post_init__(self) -> None:
        flags = CXX_FLAGS
        sanitize = os.environ.get("DSX_BUILD_SANITIZE", "")
        link = (
            "-shared -Wl,--exclude-libs,ALL"
            if sys.platform.startswith("linux")
            else "-shared -undefined dynamic_lookup"
        )
        if sanitize:
            flags += f" {SANITIZE_FLAGS} -fsanitize={sanitize}"
            link += f" -fsanitize={sanitize}"
        include = self.include_flags()
        python = f"-isystem {shlex.quote(sysconfig.get_path('include'))}"
        self.lines = [
            "ninja_required_version = 1.5",
            f"flags = {flags} {include} -isystem inc_pybind11 {python} {os.environ.get('CXXFLAGS', '')}",
            "rule cxx",
            f"  command = {self.cxx} -MMD -MF $out.d $flags $extra -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {self.cxx} {link} $in -o $out $libs",
        ]

    def include_flags(self) -> str:
        """The package's own headers and the shared ones."""
        return " ".join(f"-I{shlex.quote(str(self.root / i))}" for i in (*self.includes, SHARED))

    def compile(self, source: Path, name: str, extra: str) -> str:
        """One object."""
        self.lines += [f"build {name}: cxx {quote(source)}", f"  extra = {extra}"]
        return name

    def link(self, target: str, objects: list[str], libs: str) -> None:
        """One module."""
        self.lines += [f"build {target}: link {' '.join(objects)}", f"  libs = {libs}"]

    def add_nvcc(self, nvcc: Path) -> None:
        """The rule for device code."""
        archs = [a.strip() for a in os.environ.get("DSX_CUDA_ARCHS", "80;90;100").split(";") if a.strip()]
        code = [f"-gencode arch=compute_{a},code=sm_{a}" for a in archs]
        code.append(f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        include = self.include_flags()
        # -fmad=false: the same bits as the CPU kernels.
        flags = f"-std=c++17 -O3 -t 2 -fmad=false -cudart static -ccbin {shlex.quote(shlex.split(self.cxx)[0])}"
        flags += " -Xcompiler -fPIC,-fvisibility=hidden"
        self.lines += [
            "rule nvcc",
            f"  command = {shlex.quote(str(nvcc))} -MMD -MF $out.d {flags} {' '.join(code)} {include} -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]

    def run(
        self, what: str, hint: str, announce: Callable[[str], None] = lambda text: None, seconds: float = 0
    ) -> None:
        """Write the file when its text changed, and build; `announce` is told what is compiled, which takes
        `seconds` of one core in all.
        """
        text = "\n".join(self.lines) + "\n"
        path = self.folder / "build.ninja"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        import ninja  # lazy import: only a build with native code needs it

        jobs = os.environ.get("DSX_BUILD_JOBS") or os.environ.get("MAX_JOBS")
        command = [str(Path(ninja.BIN_DIR) / "ninja"), *(["-j", jobs] if jobs else [])]
        self.say_what_is_due(command, what, int(jobs or os.cpu_count() or 1), announce, seconds)
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            output = (done.stdout + done.stderr)[-OUTPUT_SHOWN:]
            raise NativeBuildError(f"compiling {what} failed; {hint}\n{output}")

    def say_what_is_due(
        self, command: list[str], what: str, jobs: int, announce: Callable[[str], None], seconds: float
    ) -> None:
        """One line: how many files are to be compiled, by what, and how long that may take."""
        dry = subprocess.run([*command, "-n", "-d", "explain"], cwd=self.folder, capture_output=True, text=True)
        files = [
            line for line in self.lines if line.startswith("build ") and not line.split(": ", 1)[1].startswith("link ")
        ]
        due = sum(1 for line in dry.stdout.splitlines() if line.startswith("[") and " -c " in line)
        if due == 0 or not files:
            return
        text = f"{what}: compiling {due} file{'s' * (due != 1)} with {self.cxx}, {jobs} at a time"
        if seconds:
            minutes = seconds * due / len(files) / min(jobs, due) / 60
            text += f"; about {max(1, round(minutes))} min on idle cores"
        announce(text)


class DsxNativeHook(BuildHookInterface):
    """See the module's text."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if self.target_name == "sdist":
            build_data["force_include"][__file__] = "_build_support/dsx_build.py"
            build_data["force_include"][str(SHARED)] = "_build_support/native"
            return
        modules = self.native_modules()
        package = str(self.config["package"])
        if version == "editable":
            self.install_in_tree(modules, Path(self.root) / "src" / package)
        else:
            build_data["force_include"][str(LOADER)] = f"{package}/{LOADER_IN_PACKAGE}"
        if not modules:
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"].update({str(m): f"{package}/{m.name}" for m in modules})

    def install_in_tree(self, modules: list[Path], folder: Path) -> None:
        """Editable: the modules and the loader go beside the sources (git ignores them), and what an earlier build left
        and this one does not make goes away.
        """
        replace_file(LOADER, folder / LOADER_IN_PACKAGE)
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        names = {f"{self.config[k]}{suffix}" for k in ("module", "cuda_module") if k in self.config}
        for stale in names - {m.name for m in modules}:
            (folder / stale).unlink(missing_ok=True)
        for module in modules:
            replace_file(module, folder / module.name)

    def native_modules(self) -> list[Path]:
        """The compiled modules; none when the switches or the machine say so."""
        wanted = switch("DSX_BUILD_NATIVE")
        if wanted == "0":
            return []
        compiler, tried = find_compiler()
        if compiler is None:
            text = (
                f"no C++ compiler found (tried {', '.join(tried)}); install g++ or clang++ (or set CXX), "
                "or set DSX_BUILD_NATIVE=0 to build without native code [DSX602] docs: dsx explain DSX602"
            )
            if wanted == "1":
                raise NativeBuildError(text)
            self.app.display_warning(f"{self.config['package']}: building WITHOUT native code: {text}")
            return []
        modules = [self.compile_cpu(compiler)]
        if self.cuda_wanted():
            modules.append(self.compile_cuda(compiler))
        return modules

    def cuda_wanted(self) -> bool:
        """Whether the CUDA module is to be built."""
        if "cuda_module" not in self.config:
            return False
        wanted = switch("DSX_BUILD_CUDA")
        if wanted == "1" and find_nvcc() is None:
            raise NativeBuildError(
                "DSX_BUILD_CUDA=1, but nvcc is neither in CUDA_HOME/bin nor on PATH; install the CUDA toolkit"
            )
        return wanted == "1" or (wanted == "auto" and find_nvcc() is not None and has_gpu())

    def build_folder(self) -> Path:
        """Keyed by platform, Python and sanitizer, so that none of them overwrites another's objects."""
        key = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        sanitize = os.environ.get("DSX_BUILD_SANITIZE", "")
        if sanitize:
            key += "-" + sanitize.replace(",", "-")
        folder = Path(self.root) / "build" / key
        folder.mkdir(parents=True, exist_ok=True)
        import pybind11  # lazy import: only a build with native code needs it

        # Isolated builds find pybind11 at a new path each time; a stable name keeps the command lines, and so the
        # objects.
        link, target = folder / "inc_pybind11", pybind11.get_include()
        if not link.is_symlink() or os.readlink(link) != target:
            temporary = folder / f".inc_pybind11.{os.getpid()}"
            temporary.symlink_to(target)
            os.replace(temporary, link)
        return folder

    def files(self, key: str) -> list[Path]:
        """The sources a configuration key names, sorted."""
        found = sorted({p for pattern in self.config.get(key, ()) for p in Path(self.root).glob(pattern)})
        if self.config.get(key) and not found:
            raise NativeBuildError(f"{key} = {self.config[key]} matches no file under {self.root}")
        return found

    def merged(self, folder: Path) -> Path:
        """A file that includes all `merged_sources`; written when its text changed."""
        text = "".join(f'#include "{source}"\n' for source in self.files("merged_sources"))
        path = folder / "merged.cpp"
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        return path

    def compile_cpu(self, compiler: str) -> Path:
        """The module for the CPU."""
        folder = self.build_folder()
        ninja_file = NinjaFile(Path(self.root), folder, list(self.config.get("include", ())), compiler)
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        isas = X86_ISAS if x86 else {"base": ""}
        known = "-DDSX_X86=1" if x86 else ""
        # Overflow and shift checks on every lane of the vector code take minutes to compile; addresses are checked
        # there too.
        lanes = "-fno-sanitize=undefined" if os.environ.get("DSX_BUILD_SANITIZE") else ""
        objects = [ninja_file.compile(s, f"{s.stem}.o", known) for s in self.files("sources")]
        if "merged_sources" in self.config:
            objects.append(ninja_file.compile(self.merged(folder), "merged.o", known))
        for source in self.files("isa_sources"):
            for isa, flags in isas.items():
                extra = f"-DDSX_ISA={isa} -DDSX_ISA_{isa.upper()}=1 {known} {flags} {lanes} {QUIET}"
                objects.append(ninja_file.compile(source, f"{source.stem}.{isa}.o", extra))
        target = f"{self.config['module']}{sysconfig.get_config_var('EXT_SUFFIX')}"
        ninja_file.link(target, objects, "-lpthread -ldl" if sys.platform.startswith("linux") else "")
        ninja_file.run(
            str(self.config["package"]),
            "the compiler's own words follow; DSX_BUILD_NATIVE=0 builds without native code",
            self.app.display_info,
            float(self.config.get("seconds", 0)),
        )
        return folder / target

    def compile_cuda(self, compiler: str) -> Path:
        """The module for CUDA, with a static runtime of its own."""
        nvcc = find_nvcc()
        if nvcc is None:
            raise NativeBuildError("nvcc disappeared during the build")
        folder = self.build_folder() / "cuda"
        folder.mkdir(exist_ok=True)
        includes = list(self.config.get("include", ()))
        ninja_file = NinjaFile(Path(self.root), folder, includes, compiler)
        ninja_file.lines[1] = ninja_file.lines[1].replace("inc_pybind11", "../inc_pybind11")
        ninja_file.add_nvcc(nvcc)
        objects = []
        for source in self.files("cuda_sources"):
            if source.suffix == ".cu":
                objects.append(f"{source.stem}.cu.o")
                ninja_file.lines.append(f"build {objects[-1]}: nvcc {quote(source)}")
            else:
                objects.append(ninja_file.compile(source, f"{source.stem}.o", ""))
        target = f"{self.config['cuda_module']}{sysconfig.get_config_var('EXT_SUFFIX')}"
        ninja_file.link(target, objects, f"-L{quote(cudart_folder(nvcc))} -lcudart_static -lrt -lpthread -ldl")
        ninja_file.run(
            f"{self.config['package']} for CUDA",
            "DSX_BUILD_CUDA=0 builds without CUDA",
            self.app.display_info,
            float(self.config.get("cuda_seconds", 0)),
        )
        return folder / target
