"""A rank that runs one function: ``python -m executors.agents.mpi.task ADDRESS PORT SIZE``, started by mpirun.

It gets the call from the driver at ADDRESS and PORT, and sends the outcome there, like an agent that is its own worker.
The secret of the job is in its environment.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from contextlib import closing
from functools import partial

import cloudpickle

from executors.agents.hosts.agent import CONNECT_SECONDS, AgentLink
from executors.agents.hosts.messages import Begin
from executors.agents.local.supervisor import MessageReceived, WorkerStarted
from executors.agents.local.task import forget_folder
from executors.agents.local.work import CallWork
from executors.driver.outcome import Outcome, observe
from executors.job.job import secret_of
from executors.launchers.table import place_of


def main() -> int:
    """Run the call; the exit status shows whether it failed. Raises OSError if the driver cannot be reached."""
    address, port, size = sys.argv[1:]
    secret, rank, host = secret_of(os.environ), _rank(int(size)), socket.gethostname()
    with closing(socket.create_connection((address, int(port)), CONNECT_SECONDS)) as sock:
        outcome = _serve(AgentLink(sock, secret, host), rank, host)
    return int(outcome.failed)


def _rank(size: int) -> int:
    place = place_of(os.environ)
    rank, found = (place.rank, place.size) if place else (0, 1)
    if found != size:
        sys.exit(f"mpirun was to start {size} ranks, but its variables here say {found}; use another mpirun")
    return rank


def _serve(link: AgentLink, rank: int, host: str) -> Outcome:
    link.send(WorkerStarted(rank, os.getpid()))
    begin = link.first()[0]
    if not isinstance(begin, Begin) or not isinstance(begin.work, CallWork):
        raise ConnectionAbortedError(f"the driver began with {begin!r}")
    outcome = observe(partial(_call, begin.work.call), rank, host)
    link.send(MessageReceived(rank, cloudpickle.dumps(outcome)))
    return outcome


def _call(call: bytes) -> object:
    return pickle.loads(call)()


if __name__ == "__main__":
    forget_folder()
    sys.exit(main())
