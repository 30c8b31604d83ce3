"""``hvd-top``."""

import builtins

import pytest

from collectives.observe.live.snapshot import Slow, Snapshot, Stall, snapshot_key
from executors.dashboard import server as pictures_module
from executors.dashboard.dashboard import Dashboard
from executors.dashboard.picture import Address
from executors.job.job import Job
from executors.job.output import Output
from hvd_cluster.top import main

pytest.importorskip("rich")


@pytest.fixture
def shown(monkeypatch):
    """The dashboard of a job, with a straggler and a stall."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(pictures_module, "TICK_SECONDS", 0.02)
    with Job(2) as job, Dashboard(job, Address()) as dashboard:
        slow, stall = Slow(1, 0.5, "late"), Stall("gradient", (1,), 60.0, 1.0, 3)
        sent = Snapshot(0.0, 0, 2, 0, "node-a", 7, slow=(slow,), stalls=(stall,), steps=3, batch=1234)
        job.store.set(snapshot_key("worker-0"), sent.encode())
        sink = dashboard.watched(Output(2)).sink(0, "stdout")
        sink.feed(b"[bold]no markup[/bold] \x1b[2J\x07 end\n")
        yield dashboard


def test_it_shows_what_the_page_shows(shown, capsys):
    capsys.readouterr()
    assert main([shown.link, "--once"]) == 0
    out = capsys.readouterr().out
    assert "runs; world 0, 2 ranks, 0.0 batches/s, 0.0 steps/s" in out
    assert "node-a" in out
    assert "worker-1" in out
    assert "1234" in out, "the last batch of rank 0"
    assert "! has not called init() yet" in out
    assert "stalled: gradient of process set 3 has waited for 61 s; missing: rank 1" in out
    assert "[0] [bold]no markup[/bold]" in out
    assert "\x1b[2J" not in out, "a rank must not control the terminal"
    assert "\x07" not in out


def test_it_ends_with_the_job(shown, capsys, monkeypatch):
    draw, calls = shown._server._pictures._draw, []

    def picture():
        calls.append(1)
        if len(calls) == 3:
            shown._picture.end("all is done")
            shown._server._is_serving = False
            shown._server._end.set()
        return draw()

    monkeypatch.setattr(shown._server._pictures, "_draw", picture)
    assert main([shown.link]) == 0
    assert capsys.readouterr().out.rstrip().endswith("is over: all is done")


def test_a_wrong_token(shown, capsys):
    assert main([shown.link + "x", "--once"]) == 1
    assert "hvd-top: this link has no token, or that of another job" in capsys.readouterr().err


@pytest.mark.parametrize(
    "link", ["127.0.0.1:80", "http://h/", "https://h/?token=a", "http://h:99999/?token=a", "http://[::1/?token=a", ""]
)
def test_what_is_no_link(link, capsys):
    assert main([link]) == 1
    assert "is not the link that the launcher has printed" in capsys.readouterr().err


def test_a_job_that_is_over(shown, capsys):
    link = shown.link
    shown._server.stop()
    assert main([link]) == 1
    assert "does not answer (" in capsys.readouterr().err


def test_without_rich(shown, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main([shown.link]) == 1
    assert 'pip install "hvd-cluster[top]"' in capsys.readouterr().err
