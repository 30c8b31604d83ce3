"""The frame of scripts/gpu_check, without a GPU: one stage that fails or hangs hides no other."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

import pytest

from benchmarks.measure import tabulate
from benchmarks.shared_gpu import claim_host, variables
from tests.gpu import backend, check
from tests.gpu.check import Stage, run, run_all

CHILD = "import os, time; child = os.fork(); print(os.getpid(), flush=True); time.sleep(60)"


def stage(name, code, limit=20.0, needs_nccl=False):
    return Stage(name, ("timeit", "-n", "1", "-r", "1", code), limit, needs_nccl)


def test_all_stages_run_whatever_became_of_the_others(capfd):
    chosen = [stage("bad", "raise OSError"), stage("late", "import time; time.sleep(60)", 0.5), stage("good", "pass")]
    assert run_all(chosen, os.environ, "") == ["bad", "late"]
    text = capfd.readouterr().out
    assert "bad: FAILED with status 1" in text
    assert "late: FAILED: took more than 0 s" in text
    assert "good: passed" in text


def test_a_stage_that_takes_too_long_shows_its_stacks_and_ends_with_all_its_processes(capfd):
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    assert not run(stage("late", CHILD), environment, 2.0)
    out, err = capfd.readouterr()
    assert "Fatal Python error" in err
    for process in map(int, out.split("gpu_check")[0].split()):
        with open(f"/proc/{process}/stat") if os.path.exists(f"/proc/{process}") else open(os.devnull) as status:
            assert status.read().rpartition(")")[2].split()[:1] in ([], ["Z"])


def test_stages_that_need_nccl_say_why_they_cannot_run(capfd):
    assert run_all([stage("nccl", "pass", needs_nccl=True), stage("host", "pass")], os.environ, "too old") == ["nccl"]
    assert "nccl: cannot run: too old" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["pytest", "rich"])
def test_a_package_that_only_some_stages_need_may_be_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert name not in check.missing()


def test_figures_are_shown_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    tabulate("Speed", [{"case": "allreduce", "ours": 1.25}], Namespace(json=None), ["one run"])
    assert capsys.readouterr().out == "Speed\ncase\tours\nallreduce\t1.25\none run\n"


def test_no_stage_begins_when_no_time_is_left(monkeypatch, capfd):
    monkeypatch.setattr(check, "TOTAL_SECONDS", 1.0)
    assert run_all([stage("any", "pass")], os.environ, "") == ["any"]
    assert "any: NOT RUN" in capfd.readouterr().out


def test_every_stage_is_a_module_that_takes_its_arguments():
    for each in check.stages(2, quick=False):
        module = __import__(each.arguments[0], fromlist=["main"])
        assert callable(module.main)


started = []


class Ranks:
    """Two ranks; "wrong" fails on the second one."""

    def __init__(self, size, body):
        names = body.keywords["names"]
        started.append(list(names))
        self.left = [list(names) for _ in range(size)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return

    def hear(self, rank, timeout):
        name = self.left[rank].pop(0)
        if name == "wrong" and rank:
            raise AssertionError("1 is not 2")
        return name


def test_the_matrix_goes_on_after_a_part_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(backend, "Processes", Ranks)
    assert backend.failed_parts(2, ["first", "wrong", "last"], backend.matrix) == ["wrong"]
    assert started == [["first", "wrong", "last"], ["last"]]
    text = capsys.readouterr().out
    assert "wrong: FAILED" in text
    assert "rank 1:" in text
    assert "last: passed" in text


def test_ranks_that_share_a_gpu(monkeypatch):
    assert variables(2, 2, 22809) == {}
    assert variables(2, 1, 23203)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    claim_host()
    assert "NCCL_HOSTID" not in os.environ
    for name, value in variables(2, 1, 22809).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_HOSTID", "")
    claim_host()
    assert os.environ["NCCL_HOSTID"] == f"process-{os.getpid()}"
