import base64

import pytest

from collectives.api import Topology
from collectives.settings import Settings, world_from_environment
from collectives.store.client import RendezvousClient
from executors.api import JobSecret
from executors.job.job import Job, is_job_id
from executors.job.worlds import assign_ranks


def test_the_environment_of_a_rank_leads_to_the_store_of_the_driver():
    slots = assign_ranks(["a", "a", "b"])
    with Job(3) as job:
        environment = job.environment(slots[2])
        settings, world = Settings.from_environment(environment), world_from_environment(environment)
        client = RendezvousClient(*world.rendezvous, settings.secret)
        client.set("key", b"value")
        assert job.store.get("key", timeout=0.0) == b"value"
        client.close()
        assert world.job == world_from_environment(job.environment(slots[0])).job
    assert world.topology == Topology(2, 3, 0, 1, 1, 2, hosts=(), cores=0)
    assert (world.host, world.rendezvous[0], world.round) == ("b", "127.0.0.1", 0)
    assert settings.cpu_operations == "auto"


def test_the_environment_is_complete_and_made_of_strings():
    secret = JobSecret(b"0123456789")
    with Job(1, secret=secret) as job:
        environment = job.environment(assign_ranks(["a"])[0])
        assert environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(job.port)
    assert environment["HOROVOD_CONTROLLER"] == "gloo"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert base64.b64decode(environment["_HOROVOD_SECRET_KEY"]) == secret.key
    assert "HOROVOD_CPU_OPERATIONS" not in environment
    assert all(isinstance(value, str) for value in environment.values())


def test_every_job_has_a_secret_of_its_own_that_is_not_shown():
    first, second = Job(1).secret, Job(1).secret
    assert first.key != second.key
    assert len(first.key) == 32
    assert repr(first) == "JobSecret()"


def test_the_id_of_a_job_is_known_as_one():
    assert is_job_id(Job(1).id)
    assert not any(map(is_job_id, ("", "1", "true", "0.0.0.0:8265", f"{Job(1).id}0")))


def test_misuse_says_what_to_do():
    job = Job(2)
    with pytest.raises(RuntimeError, match="inside its with block"):
        job.environment(assign_ranks(["a", "a"])[0])
    with job, pytest.raises(ValueError, match="job of 1 ranks, this one has 2"):
        job.environment(assign_ranks(["a"])[0])
    with pytest.raises(ValueError, match="at least 1 rank, got size 0"):
        Job(0)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"192\.0\.2\.1"), Job(1, host="192.0.2.1"):
        pass
