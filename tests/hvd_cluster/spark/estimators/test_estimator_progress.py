"""From the lines of rank 0 to a bar or a log in the driver."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from hvd_cluster.spark.estimators import progress
from hvd_cluster.spark.estimators.progress import FitProgress, ProgressReporter, ProgressStream


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def lines(capsys):
    """What a worker writes, as it comes to the driver."""
    return lambda: [f"[0]<stdout>:{line}\n" for line in capsys.readouterr().out.splitlines()]


def test_progress_reaches_the_driver(clock, lines):
    reporter = ProgressReporter(True, lambda: clock.now)
    reporter.begin()
    asked = []
    clock.now += 0.5
    reporter.step(0, 3, 100, lambda: asked.append("too early"))
    clock.now += 1.5
    reporter.step(0, 3, 400, lambda: 0.25)
    clock.now += 2
    reporter.end(0, 3, 1000, 0.2, 0.3)
    shown, rest = [], io.StringIO()
    stream = ProgressStream(rest, shown.append)
    stream.write("".join(["[1]<stdout>:hello\n", *lines(), "bye\n"]))
    assert shown == [FitProgress(1, 3, 400, 200.0, 0.25), FitProgress(1, 3, 1000, 250.0, 0.2, 0.3, done=True)]
    assert rest.getvalue() == "[1]<stdout>:hello\nbye\n"
    assert not asked


def test_a_line_that_only_looks_like_progress_is_passed_on():
    shown, rest = [], io.StringIO()
    line = f"{progress.MARK}" + '{"epoch": 3}\n'
    ProgressStream(rest, shown.append).write(line)
    assert (shown, rest.getvalue()) == ([], line)


def test_silence(lines):
    reporter = ProgressReporter(False)
    reporter.begin()
    reporter.end(0, 1, 10, 0.5, None)
    assert lines() == []


def test_without_a_terminal_there_is_a_line_for_each_epoch(caplog):
    show = progress.display()
    with caplog.at_level(logging.INFO, progress.__name__):
        show(FitProgress(1, 2, 500, 100.0, 0.5))
        show(FitProgress(1, 2, 1000, 1234.5, 0.25, 0.5, done=True))
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 1/2: 1000 rows, 1,234 rows/s, loss 0.25, validation loss 0.5"
    ]


def test_a_terminal_has_a_bar(monkeypatch):
    pytest.importorskip("tqdm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    show = progress.display()
    for epoch in (1, 2):
        show(FitProgress(epoch, 2, 1000, 50.0, 0.125, done=True))
    assert "epoch 2/2: 1000 rows, 50 rows/s, loss 0.125" in terminal.getvalue()
    assert "2/2" in terminal.getvalue().splitlines()[-1]
