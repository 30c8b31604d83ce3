"""The live page in a real browser without a window."""

import re
import subprocess

import pytest

from benchmarks.browser import EXECUTABLE, FLAGS
from collectives.observe.live.snapshot import Slow, Snapshot, Stall, snapshot_key
from executors.dashboard.dashboard import Dashboard
from executors.dashboard.picture import Address
from executors.job.job import Job
from executors.job.output import Output
from executors.job.worlds import Published, world_key

LINE = "<img src=x onerror=alert(1)> & more"
pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium; install it: apt-get install chromium"),
    pytest.mark.leaves("processes"),
]


def publish(job):
    """An elastic job: three workers on two hosts, the second of them slow."""
    members = (("worker-0", "a"), ("worker-2", "a"), ("worker-3", "b"))
    job.store.set(world_key(0), Published(0, members[:2]).encode())
    job.store.set(world_key(1), Published(1, members, text="rank 2 on host b joined").encode())
    slow, stall = Slow(1, 0.6, "late submission"), Stall("gradient 7", (1,), 60.0, 1.0, 3)
    for time_, waiting in ((0.0, 0.0), (4.0, 3.0)):
        for rank, (worker, host) in enumerate(members):
            about = {"slow": (slow,), "stalls": (stall,)} if rank == 0 else {}
            numbers = {"batches": int(time_) * 5, "samples": int(time_) * 8, "steps": int(time_), "batch": 77}
            sent = Snapshot(time_, rank, 3, 1, host, 10 + rank, nbytes=4000, waiting=waiting, **numbers, **about)
            job.store.set(snapshot_key(worker), sent.encode())
        yield


def seen(link, folder):
    """The document once it has loaded: the script has drawn the first picture."""
    command = [EXECUTABLE, *FLAGS, f"--user-data-dir={folder}", "--dump-dom", link]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def text_of(document):
    """What a reader sees, without scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", document, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_a_browser_shows_the_job(tmp_path):
    with Job(2) as job, Dashboard(job, Address()) as dashboard:
        sink = dashboard.watched(Output(2)).sink(3, "stderr")
        sink.feed(LINE.encode() + b"\n")
        for _ in publish(job):
            dashboard._draw()
        document = seen(dashboard.link, tmp_path)
    shown = text_of(document)
    assert f"hvd-cluster job {job.id}" in shown
    assert "The job runs." in shown
    assert "a: 2 ranks" in shown
    assert "b: 1 rank" in shown
    assert "rank 1 · worker-2 · process 11" in shown, "the worker has the name that it has in the log"
    assert "world 1: 3 ranks, rank 2 on host b joined" in shown
    assert "! straggler: the others wait for it for 60% of their time (late submission)" in shown, "not by colour alone"
    assert "gradient 7 of process set 3 has waited for 61 s; missing: rank 1" in shown
    assert shown.count("waits 75 % of its time") == 3
    assert shown.count("last batch 77") == 3
    assert "24.0 samples/s" in shown
    assert "1.00 steps/s" in shown
    assert "stderr: &lt;img src=x onerror=alert(1)&gt; &amp; more" in shown, "output of ranks is text and no markup"
    assert "Record 10 seconds" in shown
