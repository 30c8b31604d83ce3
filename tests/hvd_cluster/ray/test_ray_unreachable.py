"""A worker that Ray cannot reach is lost, and is killed, because it may still hold its place. No cluster is needed."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from executors.agents.ray import actors, group
from executors.agents.ray.call_on_ranks import CallOnRanks
from executors.agents.ray.placement.nodes import how
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.worker import Location
from executors.api import WorkerError
from executors.failures import Failure, FailureKind
from executors.job.job import Job

# Ray opens connections for the cluster of other tests whenever it likes.
pytestmark = pytest.mark.leaves("descriptors", "processes")

ERROR = ActorUnavailableError("RpcError: no route\nto host", b"\0" * 16)
NODE = "f1" * 28
HERE = Location(NODE, "192.0.2.7", "host", 1)


@pytest.fixture
def killed(monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    return killed


@pytest.fixture
def answers(monkeypatch):
    """What the actors answer that are started from now on, one after the other."""
    answers = []
    monkeypatch.setattr(actors, "actor_class", lambda _: FakeClass(answers))
    monkeypatch.setattr(group, "actor_class", lambda _: FakeClass(answers))
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references[:1], references[1:]))
    monkeypatch.setattr(ray, "get", lambda reference, **_: reference.result())
    return answers


class FakeClass:
    def __init__(self, answers):
        self.answers = answers

    def options(self, **_):
        return self

    def remote(self):
        reference = Reference()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            reference.set_exception(answer)
        else:
            reference.set_result(answer)
        return SimpleNamespace(location=SimpleNamespace(remote=lambda: reference), reference=reference)


class Reference(Future):
    def future(self):
        return self


def test_its_end_in_a_few_words():
    assert how(ERROR) == "cannot be reached: RpcError: no route to host"


def test_an_elastic_job_loses_it(answers, killed):
    answers.append(ERROR)
    lost = []
    events = SimpleNamespace(lost=lambda *facts: lost.append(facts))
    room = SimpleNamespace(place=lambda node, taken: SimpleNamespace(strategy=node, bundle=None))
    started = actors.Actors(RayRequest(1), room, actors.ActorWork(None), events, lambda action: action())
    started.start("worker-0", NODE, {})
    assert lost == [("worker-0", NODE, Failure(FailureKind.EXIT, how(ERROR)))]
    assert len(killed) == 1
    assert started.running == 0


def test_another_one_takes_its_place_at_the_start(answers, killed, caplog):
    answers += [ERROR, HERE]
    reservation = SimpleNamespace(request=RayRequest(1), strategy=lambda _: None)
    [member] = group.launch(reservation, 60)
    assert member.location == HERE
    assert [actor.reference.exception() for actor in killed] == [ERROR]
    assert [record.message for record in caplog.records] == [
        f"a worker {how(ERROR)} before it was ready; another one takes its place"
    ]


def test_a_call_ends(answers, killed):
    answers.append(ERROR)
    member = group.JobActor(None, HERE, SimpleNamespace(rank=0, host=NODE))
    gathering = CallOnRanks([member], lambda *_: FakeClass(answers).remote().reference, Job(1))
    gathering.wait()
    assert not gathering.complete
    with pytest.raises(WorkerError, match=r"the worker of rank 0 .* died: The actor .* is unavailable: RpcError"):
        gathering.values()
