"""Compiling, caching and loading the kernels, and what happens where that is impossible."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paged_kernels import dispatch
from paged_kernels.cpu import build, threads
from paged_kernels.cpu.build import KernelsUnavailable, library_path, load_library
from paged_kernels.reference import ReferenceBackend


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel file that compiles in no time, in place of the real ones."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "paged_kernels.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_second_build_is_a_cache_hit(tiny_sources: Path, tmp_path: Path) -> None:
    first = library_path(tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert library_path(tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    assert load_library(tmp_path / "cache").answer() == 42
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert first.parent.stat().st_mode & 0o777 == 0o700


def test_changed_sources_flags_or_processor_build_anew(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library_path(tmp_path / "cache")
    portable = library_path(tmp_path / "cache", "portable")
    (tiny_sources / "vec.h").write_text("// new\n")
    edited = library_path(tmp_path / "cache")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"other"}))
    assert len({first, portable, edited, library_path(tmp_path / "cache")}) == 4


def test_a_damaged_library_is_rebuilt(tiny_sources: Path, tmp_path: Path) -> None:
    library_path(tmp_path / "cache").write_bytes(b"torn")
    assert load_library(tmp_path / "cache").answer() == 42


def test_a_folder_others_can_write_to_is_refused(tiny_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="written by others"):
        library_path(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tiny_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="file"):
        library_path(tmp_path / "file")


def test_a_failing_compiler_gives_its_reason_and_leaves_nothing(tiny_sources: Path, tmp_path: Path) -> None:
    (tiny_sources / "paged_kernels.cpp").write_text("#error no such luck\n")
    with pytest.raises(KernelsUnavailable, match="no such luck"):
        library_path(tmp_path / "cache")
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_no_compiler_gives_a_remedy(tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelsUnavailable, match="install one"):
        library_path(tmp_path / "cache")


def test_cxx_is_asked_first_and_a_broken_one_passed_over(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 'my compiler 9'"))
    assert build.find_compiler() == (str(tmp_path / "fake-g++"), "my compiler 9")
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "exit 1"))
    assert build.find_compiler()[0] != str(tmp_path / "fake-g++")


def test_auto_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        backend = dispatch.make_backend("cpu", torch.float32, cache_dir=tmp_path)
    assert isinstance(backend, ReferenceBackend)
    (record,) = caplog.records
    assert "slower" in record.getMessage()
    assert "install" in record.getMessage()
    assert "remedy" in dispatch.describe(tmp_path)
    with pytest.raises(KernelsUnavailable):
        dispatch.make_backend("cpu", torch.float32, "cpu", cache_dir=tmp_path)


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float16, 16), (torch.float32, 8), (torch.float32, 24)])
def test_what_the_kernels_cannot_do_runs_on_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, block_size: int
) -> None:
    backend = dispatch.make_backend("cpu", dtype, block_size=block_size, cache_dir=tmp_path)
    assert isinstance(backend, ReferenceBackend)
    assert backend.dtype == dtype
    assert len(caplog.records) == 1


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="tritn"):
        dispatch.make_backend("cpu", torch.float32, "tritn")
    with pytest.raises(ValueError, match="runs on the CPU"):
        dispatch.make_backend("cuda", torch.float32, "cpu")


def test_threads_are_set_for_torch_and_kernels() -> None:
    before = torch.get_num_threads()
    try:
        dispatch.make_backend("cpu", torch.float32, "reference", threads=3)
        assert torch.get_num_threads() == 3
        dispatch.make_backend("cpu", torch.float32, "reference")
        assert torch.get_num_threads() == threads.available_cores()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_a_cgroup_quota_limits_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "_physical_cores", lambda: 8)
    assert threads.available_cores() == cores


def test_kernels_and_torch_share_one_openmp_runtime(kernel_cache: Path) -> None:
    """In a process of its own: two runtimes would fight over the cores."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    code = (
        "import sys; from pathlib import Path; from paged_kernels.cpu.build import load_library\n"
        "load_library(Path(sys.argv[1]))\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(*(path for path in maps if 'gomp' in path or 'libomp' in path or 'iomp' in path))"
    )
    kernels = Path(build.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(kernel_cache)], capture_output=True, text=True, check=True, cwd=kernels
    )
    assert len(done.stdout.split()) == 1
