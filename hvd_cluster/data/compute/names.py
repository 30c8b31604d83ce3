"""The keys of the store in which a compute service keeps what it knows."""

from __future__ import annotations

__all__ = ["END", "PLAN", "address", "claims", "complete", "free", "users", "worker", "workers"]

PLAN = "plan"
"""The numbers of dispatchers and of workers for each, and the port of the presence server."""
END = "end"
"""Empty after an orderly shutdown, else the reason of the end."""


def claims(dispatcher: int) -> str:
    """Counts the registrations of a dispatcher; the first of them sets the address."""
    return f"dispatchers/{dispatcher}/claims"


def address(dispatcher: int) -> str:
    """The address of a dispatcher, ``host:port``."""
    return f"dispatchers/{dispatcher}/address"


def worker(dispatcher: int, number: int) -> str:
    """Counts the registrations of one worker; only the first of them counts for all."""
    return f"dispatchers/{dispatcher}/workers/{number}"


def workers(dispatcher: int) -> str:
    """Counts the workers of a dispatcher."""
    return f"dispatchers/{dispatcher}/registered"


def complete(dispatcher: int) -> str:
    """Exists once a dispatcher has all its workers."""
    return f"dispatchers/{dispatcher}/complete"


def users(dispatcher: int) -> str:
    """Counts the processes that read from a dispatcher."""
    return f"dispatchers/{dispatcher}/users"


def free(dispatcher: int) -> str:
    """Exists once the last reader has left a dispatcher."""
    return f"dispatchers/{dispatcher}/free"
