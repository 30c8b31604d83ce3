"""The process that searches."""

import os
import sys
import threading
import time

import pytest

from collectives.observe.autotune import search as module
from collectives.observe.autotune.search import ProcessSearch, SearchError, is_available

# Not by importing it: it changes the names of all semaphores of this process.
needs_library = pytest.mark.skipif(not is_available(), reason="needs the package: pip install bayesian-optimization")


@pytest.fixture
def search():
    search = ProcessSearch(2, 0.1)
    yield search
    search.close()


@needs_library
def test_finds_the_top_of_a_hill(search):
    def height(positions):
        return 1.0 - (positions[0] - 0.3) ** 2 - (positions[1] - 0.7) ** 2

    best = 0.0
    search.register([1.0, 0.0], height([1.0, 0.0]))
    for _ in range(8):
        positions = search.suggest()
        assert len(positions) == 2
        assert all(0.0 <= position <= 1.0 for position in positions)
        search.register(positions, height(positions))
        best = max(best, height(positions))
    assert best > 0.9


@needs_library
def test_the_same_position_may_come_again(search):
    """The library prints a line then."""
    for score in (1.0, 1.1):
        search.register([0.0, 1.0], score)
    assert len(search.suggest()) == 2


def test_an_error_of_the_library_is_told(search, monkeypatch, tmp_path):
    (tmp_path / "bayes_opt.py").write_text("raise ImportError('No module named bayes_opt')")
    monkeypatch.setattr(module, "ROOT", os.pathsep.join([str(tmp_path), module.ROOT]))
    with pytest.raises(SearchError, match="ImportError: No module named bayes_opt"):
        search.suggest()


def test_a_program_that_does_not_run(search, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SearchError, match=r"has ended: .*/no/such/python.*No such file"):
        search.suggest()


def test_a_program_that_says_something_else(search, monkeypatch):
    monkeypatch.setattr(module, "PROGRAM", "this")  # prints a poem, and ends
    with pytest.raises(SearchError, match="has ended"):
        search.suggest()


def test_kill_ends_a_call(search, monkeypatch):
    monkeypatch.setattr(module, "PROGRAM", "tests.collectives.observe.autotune.silent")
    errors = []

    def ask():
        try:
            search.suggest()
        except SearchError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while search._process is None:
        time.sleep(0.01)
    search.kill()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(SearchError, match="was ended"):
        search.suggest()
