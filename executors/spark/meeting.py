"""The tasks of a stage find each other: places -> ranks -> the rendezvous server, beside the task of rank 0."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from collectives.api import Store
from collectives.interfaces import address_of
from collectives.rendezvous.client import RendezvousClient
from executors import host
from executors.api import Slot
from executors.environment import gpu_variables, interface_variables
from executors.job import Job, environment_of
from executors.outcome import Outcome
from executors.placement import assign_ranks
from executors.spark.line import GOODBYE, Caller, Line, dial
from executors.spark.plan import DEVICES, Plan

__all__ = ["Member", "NoServerError", "Place", "meet", "server_host"]

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where Spark put a task: the identity, the name and the address of its host, and its GPUs."""

    host: str
    name: str
    address: str
    gpus: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, context: Any) -> Place:
        """The place of this task, given its BarrierTaskContext."""
        gpus = context.resources().get("gpu")
        # The name that Spark's executor has for its own host, which may be an IPv6 address in brackets.
        own = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0].strip("[]")
        return cls(host.identity(), socket.gethostname(), own, list(gpus.addresses) if gpus else [])


@dataclass(frozen=True, slots=True)
class Member:
    """One task among the others: its rank, the variables of its worker, the store of the job, its line."""

    slot: Slot
    place: Place
    environment: dict[str, str]
    store: Store
    line: Line | None


class NoServerError(Exception):
    """The task of rank 0 could not start the rendezvous server; there, ``outcome`` says why."""

    def __init__(self, outcome: Outcome | None) -> None:
        super().__init__("there is no rendezvous server")
        self.outcome = outcome


@contextmanager
def meet(plan: Plan, context: Any) -> Iterator[Member]:
    """Meet the other tasks; inside the block the rendezvous server is up, as long as the block of rank 0 lasts.

    Raises ConnectionRefusedError, in all tasks, where the driver cancelled the job, or knows other tasks of it already;
    NoServerError, in all tasks, where the server cannot start.
    """
    with ExitStack() as stack:
        places = [Place(**json.loads(text)) for text in context.allGather(json.dumps(asdict(Place.of(context))))]
        slots = assign_ranks([place.host for place in places])
        slot, place = slots[context.partitionId()], places[context.partitionId()]
        line, refused = _call_driver(plan, Caller(slot.rank, slot.host, place.name))
        if line is not None:
            stack.callback(line.close)
        offer, job, problem = _open(stack, plan, slot, places) if slot.rank == 0 else ({}, None, None)
        offers = [json.loads(text) for text in context.allGather(json.dumps(offer | {"refused": refused}))]
        if any(each["refused"] for each in offers):
            raise ConnectionRefusedError("the driver cancelled this stage, or knows its tasks from before")
        server = offers[0]  # the first task is rank 0
        if "host" not in server:
            if line is not None:
                line.send(GOODBYE)
            raise NoServerError(problem)
        environment = _environment(plan, slot, slots, places, server)
        store = job.store if job else stack.enter_context(_client(plan, server))
        yield Member(slot, place, environment, store, line)


def server_host(places: Sequence[Place], nics: Sequence[str]) -> str:
    """The address at which all reach the task of the first place. Raises SettingsError, OSError where there is none."""
    others = [place.address for place in places if place.host != places[0].host]
    if not others:
        return LOOPBACK
    return address_of(nics[0]) if nics else host.address_towards(others[0])


def _call_driver(plan: Plan, caller: Caller) -> tuple[Line | None, bool]:
    addresses, port = plan.console
    try:
        return dial(addresses, port, plan.secret, caller), False
    except ConnectionRefusedError:
        return None, True


def _open(
    stack: ExitStack, plan: Plan, slot: Slot, places: Sequence[Place]
) -> tuple[dict[str, object], Job | None, Outcome | None]:
    # The others wait for an answer, so that an error must not keep this task from giving one.
    try:
        job = stack.enter_context(Job(plan.size, server_host(places, plan.nics), plan.secret))
        return {"host": job.host, "port": job.port}, job, None
    except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the driver
        return {}, None, Outcome.raised(error, slot.rank, slot.host, places[0].name)


def _client(plan: Plan, server: dict[str, Any]) -> RendezvousClient:
    return RendezvousClient(server["host"], server["port"], plan.secret.key, CONNECT_SECONDS)


def _environment(
    plan: Plan, slot: Slot, slots: Sequence[Slot], places: Sequence[Place], server: dict[str, Any]
) -> dict[str, str]:
    gpus = {each.rank: place.gpus for each, place in zip(slots, places, strict=True) if each.host == slot.host}
    return {
        **gpu_variables([gpus[rank] for rank in sorted(gpus)]),
        **interface_variables(plan.nics),
        **environment_of(slot, server["host"], server["port"], plan.secret),
        DEVICES: ",".join(gpus[slot.rank]),
    }
