"""How the tasks of a stage find each other: they exchange locations, compute ranks, and use the server of rank 0.

They exchange texts by the driver if all of them reach it, and by Spark's barrier otherwise, which takes seconds.
A server in the driver would not do, even where all tasks reach it: ranks are known by the address on their way to the
server, and the driver may be in another network.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives import RendezvousClient, Store, interfaces
from executors.agents.spark.connection import GOODBYE, DriverConnection, TaskIdentity
from executors.agents.spark.meeting import TaskMeeting, connect_to_driver
from executors.agents.spark.plan import DEVICES, Plan
from executors.api import Slot
from executors.driver.outcome import Outcome
from executors.job import host
from executors.job.environment import Course, gpu_variables, interface_variables
from executors.job.job import Job, environment_of
from executors.job.worlds import assign_ranks

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TaskLocation:
    """The host of a task: its identity, name and address, and the GPUs that Spark assigned to the task."""

    host: str
    name: str
    address: str
    gpus: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, context: Any) -> TaskLocation:
        """The location of this task, given its BarrierTaskContext."""
        gpus = context.resources().get("gpu")
        # The name that Spark's executor has for its own host, which may be an IPv6 address in brackets.
        own = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0].strip("[]")
        return cls(host.identity(), socket.gethostname(), own, list(gpus.addresses) if gpus else [])


@dataclass(frozen=True, slots=True)
class TaskMember:
    """One task of the stage: rank, variables of its worker, store of the job, connection to the driver."""

    slot: Slot
    location: TaskLocation
    environment: dict[str, str]
    store: Store
    connection: DriverConnection | None


class NoServerError(Exception):
    """The task of rank 0 could not start the rendezvous server. In that task, ``outcome`` has the reason."""

    def __init__(self, outcome: Outcome | None) -> None:
        super().__init__("there is no rendezvous server")
        self.outcome = outcome


@contextmanager
def rendezvous(plan: Plan, context: Any) -> Iterator[TaskMember]:
    """Find the other tasks. The rendezvous server runs until the block of rank 0 ends.

    Raises in all tasks: ConnectionRefusedError if the driver cancelled the job or has other tasks of it already;
    NoServerError if the server cannot start. Where only some tasks raise, Spark ends the others.
    """
    placed = time.time()
    with ExitStack() as stack:
        meeting = _meet(stack, plan, context.partitionId())
        gather = _gather(meeting, context)
        locations = [TaskLocation(**json.loads(text)) for text in gather(json.dumps(asdict(TaskLocation.of(context))))]
        slots = assign_ranks([location.host for location in locations])
        slot, location = slots[context.partitionId()], locations[context.partitionId()]
        refused = meeting is not None and not meeting.identify(TaskIdentity(slot.rank, slot.host, location.name))
        offer, job, problem = _open(stack, plan, slot, locations) if slot.rank == 0 else ({}, None, None)
        offers = [json.loads(text) for text in gather(json.dumps(offer | {"refused": refused}))]
        if any(each["refused"] for each in offers):
            raise ConnectionRefusedError("the driver cancelled this stage, or has other tasks of it")
        server = offers[0]  # the first task is rank 0
        connection = None if meeting is None else meeting.connection
        if "host" not in server:
            if connection is not None:
                connection.send(GOODBYE)
            raise NoServerError(problem)
        course = Course(plan.requested or None, placed)
        environment = _environment(plan, slot, slots, locations, server) | course.variable()
        store = job.store if job else stack.enter_context(_client(plan, server))
        yield TaskMember(slot, location, environment, store, connection)


def server_host(locations: Sequence[TaskLocation], nics: Sequence[str]) -> str:
    """The address of the first location for all others. Raises SettingsError or OSError if there is none."""
    others = [location.address for location in locations if location.host != locations[0].host]
    if not others:
        return LOOPBACK
    return interfaces.address_of(nics[0]) if nics else host.address_towards(others[0])


def _meet(stack: ExitStack, plan: Plan, partition: int) -> TaskMeeting | None:
    addresses, port = plan.console
    meeting = connect_to_driver(addresses, port, plan.secret, partition, plan.start_timeout)
    if meeting is not None:
        stack.callback(meeting.connection.close)
    return meeting


def _gather(meeting: TaskMeeting | None, context: Any) -> Callable[[str], list[str]]:
    """How all tasks exchange texts. The driver has the decision, but a task that does not reach it has no choice."""
    if meeting is not None and meeting.is_by_driver():
        return meeting.gather
    gather: Callable[[str], list[str]] = context.allGather
    return gather


def _open(
    stack: ExitStack, plan: Plan, slot: Slot, locations: Sequence[TaskLocation]
) -> tuple[dict[str, object], Job | None, Outcome | None]:
    # The other tasks wait for an answer, so an error must not prevent it.
    try:
        job = stack.enter_context(Job(plan.size, server_host(locations, plan.nics), plan.secret))
        return {"host": job.host, "port": job.port}, job, None
    except Exception as error:  # noqa: BLE001  the driver raises it
        return {}, None, Outcome.raised(error, slot.rank, slot.host, locations[0].name)


def _client(plan: Plan, server: dict[str, Any]) -> RendezvousClient:
    return RendezvousClient(server["host"], server["port"], plan.secret.key, CONNECT_SECONDS)


def _environment(
    plan: Plan, slot: Slot, slots: Sequence[Slot], locations: Sequence[TaskLocation], server: dict[str, Any]
) -> dict[str, str]:
    gpus = {each.rank: location.gpus for each, location in zip(slots, locations, strict=True) if each.host == slot.host}
    return {
        **gpu_variables([gpus[rank] for rank in sorted(gpus)]),
        **interface_variables(plan.nics),
        **environment_of(slot, server["host"], server["port"], plan.secret, Course()),
        DEVICES: ",".join(gpus[slot.rank]),
    }
