"""Elastic jobs that end with their test."""

import pytest

from tests.elastic.jobs import ElasticJob


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
