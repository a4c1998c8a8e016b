"""Compile the C++ kernels on first use and load them.

The library is kept in a private folder under a name that hashes everything it depends on: sources, flags, compiler and
processor. It is loaded after torch, whose OpenMP runtime it then shares, so that both use one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (brings its libgomp, which the kernels then bind to)

SOURCES = Path(__file__).parent / "csrc"
DEFAULT_CACHE = Path.home() / ".cache" / "paged-infer"

_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_COMMON = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-w",
    "-Wno-psabi",
)
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "native": (_NATIVE,),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
    "avx512-simde": ("-O1", "-mavx2", "-mfma", "-DPAGED_SIMDE"),
}
"""What to compile for; all but `native` are for tests, `avx512-simde` emulates AVX-512 with the SIMDe headers."""


class KernelsUnavailable(RuntimeError):
    """The C++ kernels cannot be had on this machine; the message gives the reason and a remedy."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction set extensions of this processor as Linux names them; empty where /proc/cpuinfo does not exist."""
    return frozenset(_cpuinfo("flags") or _cpuinfo("Features"))


@functools.cache
def cpu_model() -> str:
    """The processor's name."""
    return " ".join(_cpuinfo("model name")) or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith(key)), [])


def find_compiler(name: str | None = None) -> tuple[str, str]:
    """Path and version line of the C++ compiler: `name`, else $CXX, else g++ or clang++.

    Raises `KernelsUnavailable`.
    """
    names = [name] if name else [*filter(None, [os.environ.get("CXX")]), "g++", "clang++"]
    for candidate in names:
        path = shutil.which(candidate)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if version.returncode == 0 and version.stdout:
            return path, version.stdout.splitlines()[0]
    raise KernelsUnavailable(
        f"no working C++ compiler ({', '.join(names)}); install one (Debian: apt-get install g++) or point $CXX to it"
    )


def library_path(cache_dir: Path, isa: str = "native", compiler: str | None = None) -> Path:
    """The compiled library, built if it is not there yet. Raises `KernelsUnavailable`."""
    path, version = find_compiler(compiler)
    flags = (*_COMMON, *ISA_FLAGS[isa])
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(repr((path, version, flags, platform.machine(), sorted(cpu_flags()))).encode())
    for source in sources:
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    folder = _private_folder(cache_dir / "kernels")
    library = folder / f"{isa}-{digest.hexdigest()[:24]}.so"
    if not library.exists():
        _compile([path, *flags, str(SOURCES / "paged_kernels.cpp")], library)
    return library


def _private_folder(folder: Path) -> Path:
    """Code is loaded from here, so nobody else may be able to write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise KernelsUnavailable(f"cannot keep compiled kernels in {folder}: {error}; choose another folder") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise KernelsUnavailable(f"{folder} can be written by others; chmod 700 it or choose another folder")
    return folder


def _compile(command: list[str], library: Path) -> None:
    """Run the compiler into a temporary file and rename it, so that a library is either whole or absent."""
    try:
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
    except OSError as error:
        raise KernelsUnavailable(f"cannot write to {library.parent}: {error}; choose another folder") from error
    try:
        done = subprocess.run([*command, "-o", temporary], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
            raise KernelsUnavailable(
                f"{command[0]} failed on the CPU kernels: {reason}; install a newer g++ (11 or later) or set $CXX"
            )
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_library(cache_dir: Path, isa: str = "native", compiler: str | None = None) -> ctypes.CDLL:
    """The loaded kernels. A cached file that cannot be loaded is rebuilt once. Raises `KernelsUnavailable`."""
    library = library_path(cache_dir, isa, compiler)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        library.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(library_path(cache_dir, isa, compiler)))
    except OSError as error:
        raise KernelsUnavailable(f"compiled kernels do not load: {error}") from error
