"""Tuning of an engine of several ranks, with a search that needs no process."""

import csv
import logging
import os
import subprocess
import threading

import pytest

from collectives.observe.autotune.autotuner import Autotuner, _shape
from collectives.observe.autotune.search import ProcessSearch, SearchError
from collectives.settings import Autotuning, Settings
from tests.collectives.engine.job import ones, run, running

LEAST = {"warmup": 0, "steps": 1, "most": 2}


class Search:
    def __init__(self, knobs, noise):
        self.knobs = knobs
        self.ended = threading.Event()

    def suggest(self):
        return [0.5] * self.knobs

    def register(self, positions, score):
        assert len(positions) == self.knobs
        assert score > 0

    def kill(self):
        self.ended.set()

    def close(self):
        self.ended.set()

    def disown(self):
        self.ended.set()


class Failing(Search):
    def register(self, positions, score):
        raise SearchError("the search for parameters failed: no")


class Waiting(Search):
    def __init__(self, knobs, noise):
        super().__init__(knobs, noise)
        self.called = threading.Event()

    def register(self, positions, score):
        self.called.set()
        assert self.ended.wait(10)
        raise SearchError("the search for parameters was ended")


def settings(**given):
    return Settings(autotune=Autotuning(**{**LEAST, **given}))


def train(job, is_over, steps=4000):
    """All ranks exchange a tensor until ``is_over``; the parameters that each rank saw, one for each step."""

    def body(engine):
        seen = []
        for _ in range(steps):
            run(engine, ones(engine), "x")
            seen.append(engine.parameters)
            over = run(engine, ones(engine) * (engine.topology.rank == 0 and is_over()), "over")[0]
            if over:
                return seen
        raise AssertionError(f"not over after {steps} steps")

    return job.run(body)


def over(tuner):
    return lambda: not tuner._tuning._thread.is_alive()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_try_the_same_parameters_at_the_same_step(size, tmp_path, caplog):
    path = tmp_path / "log.csv"
    tuner = Autotuner(Search)
    with running(size) as job, caplog.at_level(logging.WARNING):
        tuner.follow(job.engines[0], settings(log=str(path)))
        first, *others = train(job, over(tuner))
        last = train(job, lambda: True)[0][-1]
        tuner.leave()
    assert others == [first] * (size - 1)
    assert len({parameters.version for parameters in first}) > 4
    assert caplog.text.count("autotuning is over") == 1
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) > 5
    assert rows[-1]["tensor_fusion_threshold"] == str(last.fusion_threshold)


def test_a_rank_alone_says_that_there_is_nothing_to_do(caplog):
    tuner = Autotuner(Search)
    with running(1) as job, caplog.at_level(logging.INFO, "collectives"):
        tuner.follow(job.engines[0], settings())
        assert not tuner.is_searching
    assert "autotuning has nothing to do: there is only one rank" in caplog.messages


def test_what_the_user_has_set_is_never_changed():
    tuner = Autotuner(Search)
    with running(2) as job:
        tuner.follow(job.engines[0], settings(fixed=frozenset(["fusion_threshold", "patient", "cache_capacity"])))
        (seen, _) = train(job, over(tuner))
        tuner.leave()
    assert {(p.fusion_threshold, p.patient, p.cache_capacity) for p in seen} == {
        (seen[0].fusion_threshold, seen[0].patient, seen[0].cache_capacity)
    }
    assert len({parameters.cycle_time for parameters in seen}) > 1


def test_a_search_that_fails_gives_the_first_parameters_back(caplog):
    tuner = Autotuner(Failing)
    with running(2) as job, caplog.at_level(logging.WARNING):
        before = job.engines[0].parameters
        tuner.follow(job.engines[0], settings())
        train(job, over(tuner))
        (seen, _) = train(job, lambda: True)
        tuner.leave()
    assert (seen[-1].cycle_time, seen[-1].patient) == (before.cycle_time, before.patient)
    assert "the search for parameters failed: no; training goes on with the parameters as they were" in caplog.text


def test_the_end_of_the_engine_ends_the_search(caplog):
    tuner = Autotuner(Waiting)
    with running(2) as job, caplog.at_level(logging.WARNING):
        tuner.follow(job.engines[0], settings())
        tuning = tuner._tuning
        train(job, tuning._search.called.is_set)
        tuner.leave()
        assert not tuning._thread.is_alive()
    (line,) = caplog.messages
    assert line.startswith("the world ended before autotuning was over, after ")


def test_a_trial_that_is_cut_off_is_told(caplog):
    tuner = Autotuner(Search)
    with running(2) as job, caplog.at_level(logging.WARNING):
        tuner.follow(job.engines[0], settings(steps=10**6))
        job.run(lambda engine: [run(engine, ones(engine), "x") for _ in range(10)])
        tuner.leave()
    assert "the world ended before autotuning was over, after 0 trials" in caplog.text


def test_an_error_while_it_measures_ends_the_search(caplog, monkeypatch):
    def fail(*_):
        raise KeyError("oops")

    tuner = Autotuner(Search)
    with running(2) as job, caplog.at_level(logging.WARNING):
        monkeypatch.setattr("collectives.observe.autotune.scores.Scores.start", fail)
        tuner.follow(job.engines[0], settings())
        train(job, over(tuner))
        tuner.leave()
    assert "autotuning failed; training goes on" in caplog.text


def test_without_the_library_nothing_is_tried(caplog, monkeypatch):
    monkeypatch.setattr("collectives.observe.autotune.search.LIBRARY", "no_such_library")
    tuner = Autotuner()
    with running(2) as job, caplog.at_level(logging.WARNING):
        for _ in range(2):
            tuner.follow(job.engines[0], settings())
            assert tuner._tuning is None
            tuner.leave()
    (record,) = caplog.records
    assert "pip install 'hvd-cluster[autotune]'" in record.getMessage()


def test_an_idle_job_ends_while_it_tunes():
    tuner = Autotuner(Search)
    with running(2) as job:
        tuner.follow(job.engines[0], settings())
        tuning = tuner._tuning
        tuner.leave()
        assert not tuning._thread.is_alive()


def test_the_choice_holds_in_the_next_world():
    tuner = Autotuner(Search)
    with running(3) as job:
        tuner.follow(job.engines[0], settings())
        assert tuner._tuning is not None
        tuner.leave()
    with running(2) as job:
        tuner._choices[_shape(job.engines[0].topology)] = {"fusion_threshold": 12345, "cycle_time": 0.002}
        tuner.follow(job.engines[0], settings(fixed=frozenset(["cycle_time"])))
        assert tuner._tuning is None
        run_once = job.run(lambda engine: [run(engine, ones(engine), "x"), engine.parameters][1])
    assert [parameters.fusion_threshold for parameters in run_once] == [12345] * 2
    assert run_once[0].cycle_time != 0.002


def test_nothing_happens_without_the_variable():
    tuner = Autotuner(Search)
    with running(2) as job:
        tuner.follow(job.engines[0], Settings())
        assert tuner._tuning is None


def test_only_rank_0_of_several_tunes():
    tuner = Autotuner(Search)
    with running(2) as job:
        tuner.follow(job.engines[1], settings())
        assert tuner._tuning is None
    with running(1) as job:
        tuner.follow(job.engines[0], settings())
        assert tuner._tuning is None


def test_a_rank_that_becomes_rank_0_goes_on_with_the_log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("the rows of a lost rank 0\n")
    tuner = Autotuner(Search)
    with running(3) as job:
        tuner.follow(job.engines[1], settings(log=str(path)))
        tuner.leave()
    with running(2) as job:
        tuner.follow(job.engines[0], settings(log=str(path)))
        tuner.leave()
    assert path.read_text().startswith("the rows of a lost rank 0\n")


def test_a_forked_child_leaves_the_search_alone(tmp_path):
    """An open copy of a pipe would keep the process of the search alive, and one of the log its lock."""
    search = ProcessSearch(1, 0.1)
    search._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    tuner = Autotuner(lambda knobs, noise: search)
    with running(2) as job:
        tuner.follow(job.engines[0], settings(log=str(tmp_path / "log.csv")))
        tuning = tuner._tuning
        files = [search._process.stdin.fileno(), tuning._journal._file.descriptor]
        child = os.fork()
        if not child:
            tuner.disown()
            os._exit(int(tuner._tuning is not None or any(os.path.exists(f"/proc/self/fd/{file}") for file in files)))
        assert os.waitpid(child, 0)[1] == 0
        tuning.close()
