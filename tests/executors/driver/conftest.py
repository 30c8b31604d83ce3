"""A job, and the agents that its driver asks."""

import pytest
from driven import Agents

from executors.job.job import Job


@pytest.fixture
def agents():
    return Agents()


@pytest.fixture
def job():
    with Job(1) as job:
        yield job
