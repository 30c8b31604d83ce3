"""The secret of a job: in the memory of a rank, and nowhere that a child of the rank can read."""

import multiprocessing
import os

import pytest

from collectives.api import SettingsError
from collectives.settings import ENVIRONMENT_SECRET
from hvd_cluster import run
from hvd_cluster.core import basics as hvd
from hvd_cluster.core.launchers import RENDEZVOUS, Secret


def secret_of_child(start_method):
    """The environment of a child process of this one, and the error of its init()."""
    context = multiprocessing.get_context(start_method)
    with context.Pool(1) as pool:
        return pool.apply(_look)


def _look():
    try:
        hvd.init()
    except SettingsError as error:
        return os.environ.get(ENVIRONMENT_SECRET), str(error)
    return os.environ.get(ENVIRONMENT_SECRET), hvd.size()


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_no_child_of_a_rank_has_the_secret(start_method):
    def function():
        before = ENVIRONMENT_SECRET in os.environ
        hvd.init()
        return before, secret_of_child(start_method)

    for before, (secret, refusal) in run(function, num_proc=2):
        assert before
        assert secret is None
        assert "this process has no secret of the job, _HOROVOD_SECRET_KEY: a rank has started it after" in refusal
        assert "or what started it has dropped variables of the launcher" in refusal


def test_a_rank_may_shut_down_and_start_again():
    def function():
        sizes = []
        for _ in range(3):
            hvd.init()
            sizes.append(hvd.size())
            hvd.shutdown()
        return sizes

    assert run(function, num_proc=2) == [[2] * 3] * 2


def test_a_rank_may_launch_a_job_of_its_own():
    def function():
        hvd.init()
        return run(lambda: (hvd.init(), hvd.size())[1], num_proc=2)

    assert run(function) == [[2, 2]]


def test_the_secret_of_a_new_job_replaces_that_of_the_old_one():
    secret = Secret()
    first, second = {ENVIRONMENT_SECRET: "first", "A": "B"}, {ENVIRONMENT_SECRET: "second"}
    assert secret.claim(first) == {ENVIRONMENT_SECRET: "first", "A": "B"}
    assert first == {"A": "B"}
    assert secret.claim(first) == {ENVIRONMENT_SECRET: "first", "A": "B"}
    assert secret.claim(second)[ENVIRONMENT_SECRET] == "second"
    assert secret.claim({}) == {ENVIRONMENT_SECRET: "second"}
    secret.forget()
    assert secret.claim({}) == {}
    with pytest.raises(SettingsError, match=f"{RENDEZVOUS} is set, but this process has no secret"):
        secret.claim({RENDEZVOUS: "127.0.0.1"})
