"""Elastic jobs that end with their test."""

import pytest

from tests.hvd_cluster.elastic.jobs import ElasticJob
from tests.hvd_cluster.elastic.worlds import Play, fake_driver


@pytest.fixture
def start(tmp_path):
    """Starts an elastic job of ``size`` workers and waits until they train."""
    jobs = []

    def begin(size, *options, trains=True, **arguments):
        job = ElasticJob(tmp_path, "-np", size, "--min-np", 1, *options, **arguments)
        jobs.append(job)
        if trains:
            job.until_training(*range(size))
        return job

    yield begin
    for job in jobs:
        job.close()


@pytest.fixture
def play(monkeypatch):
    """A function ``play(worlds, script, ends_by_loss=())``: see :meth:`Play.run`."""
    fake_driver(monkeypatch)
    return lambda worlds, script, ends_by_loss=(): Play(worlds, ends_by_loss).run(script)
