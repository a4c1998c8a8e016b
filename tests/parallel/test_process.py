"""Workers: what they are told and tell, how their death looks, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from paged_infer.parallel.cores import core_groups
from paged_infer.parallel.process import Worker, WorkerFailed
from tests.parallel import targets


@pytest.fixture
def started():
    workers = []

    def start(target, *arguments, **options):
        worker = Worker("engine 1 of 2", target, *arguments, **options)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.stop()


def gone(pid, seconds=10.0):
    """Whether the process ends within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_answers_and_ends_when_it_is_stopped(started):
    worker = started(targets.echo, "heard ")
    worker.send("a")
    worker.send("b")
    assert [worker.receive(), worker.receive()] == ["heard a", "heard b"]
    worker.stop()
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_has_its_own_session_cpus_and_environment(started):
    cpu = min(os.sched_getaffinity(0))
    worker = started(targets.report_cpus, cpus=[cpu], environment={"MARK": "7"})
    assert worker.receive() == (worker.pid, worker.pid, [cpu], "7")


def test_both_sides_may_send_at_once(started):
    worker = started(targets.flood, 1 << 20)
    worker.send(bytes(8 << 20))
    assert [len(worker.receive()) for _ in range(64)] == [1 << 20] * 64
    assert worker.receive() == 8 << 20


def test_a_killed_worker_is_named_with_the_signal(started):
    worker = started(targets.echo, "")
    worker.send("x")
    worker.receive()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=rf"engine 1 of 2 \(process {worker.pid}\) was killed by SIGKILL"):
        worker.receive()
    worker.send("to nobody")


def test_a_failed_worker_is_quoted_with_the_end_of_its_log(started):
    with pytest.raises(WorkerFailed) as caught:
        started(targets.fail).receive()
    assert "ended with exit code 1" in str(caught.value)
    assert "line 39" in str(caught.value)
    assert "ValueError: cannot go on" in str(caught.value)
    assert "line 3\n" not in str(caught.value)


def test_a_worker_that_does_not_listen_is_stopped_with_what_it_has_started(started):
    worker = started(targets.busy_forever)
    pids = worker.receive()
    os.kill(worker.pid, signal.SIGSTOP)
    worker.stop(0.1)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(number):
    code = (
        "import time\nfrom paged_infer.parallel.process import Worker\nfrom tests.parallel import targets\n"
        "worker = Worker('w', targets.echo, '')\nworker.send('x')\nworker.receive()\n"
        "loading = Worker('v', targets.echo, '')\nprint(worker.pid, loading.pid, flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    parent.wait()
    assert all(gone(pid) for pid in pids)


def test_core_groups_are_disjoint_and_cover_what_may_be_used(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr("paged_infer.parallel.cores._core", lambda cpu: (0, cpu % 3))  # two threads a core
    assert core_groups(3) == [frozenset({0, 3}), frozenset({1, 4}), frozenset({2, 5})]
    assert core_groups(2) == [frozenset({0, 3}), frozenset({1, 4, 2, 5})]
    assert core_groups(4) == [None] * 4
