"""Pure: the worlds of a job whose lost workers have successors. The number of workers stays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from executors.api import Slot
from executors.changes import describe
from executors.worlds import Published

__all__ = ["Succession"]


class Succession:
    """The worker in each place, and the present :attr:`world`. The first worker in place ``p`` is on ``hosts[p]``.

    Places stay; ranks do not. Survivors keep the order of their ranks, and their successors come after them, so that
    rank 0 has the state.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._names = (f"worker-{number}" for number in itertools.count())
        self._hosts: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._ready: set[str] = set()
        self._cut_off: set[str] = set()
        self.workers = [self._name(host) for host in hosts]
        """By their places."""
        self.world = Published(0, self._with_hosts(self.workers))

    def slot(self, worker: str) -> Slot:
        """That of ``worker``: in the present world, or in the next one for a successor."""
        return self.world.slots().get(worker) or Published(-1, self._with_hosts(self._next_order())).slots()[worker]

    def lose(self, place: int, text: str) -> None:
        """The worker in ``place`` is gone: ``text`` says how."""
        self._lost.setdefault(self.workers[place], text)

    def succeed(self, place: int, host: str) -> str:
        """A successor has come into ``place``, on ``host``: its name."""
        self.lose(place, "was replaced")
        worker = self.workers[place] = self._name(host)
        return worker

    def ready(self, worker: str) -> Published | None:
        """``worker`` waits for its first world. Returns the next world, if all who will be in it can come."""
        self._ready.add(worker)
        return self._next()

    def cut_off(self, worker: str, round: int) -> Published | None:
        """``worker`` has left the world of ``round``, which broke. Returns as :meth:`ready`."""
        if round == self.world.round:
            self._cut_off.add(worker)
        return self._next()

    def change(self, before: Published) -> str:
        """How the workers changed from ``before`` to the present world."""
        return describe(before, self.world, self._lost, {})

    def _next(self) -> Published | None:
        if self._lost.keys() & set(self.workers):
            return None
        members = {worker for worker, _ in self.world.workers}
        newcomers = set(self.workers) - members
        if not newcomers <= self._ready or not (newcomers or members <= self._cut_off):
            return None
        before, self.world = self.world, Published(self.world.round + 1, self._with_hosts(self._next_order()))
        self._cut_off.clear()
        self.world = Published(self.world.round, self.world.workers, text=self.change(before))
        return self.world

    def _next_order(self) -> list[str]:
        survivors = [worker for worker, _ in self.world.workers if worker in self.workers]
        return [*survivors, *(worker for worker in self.workers if worker not in survivors)]

    def _name(self, host: str) -> str:
        worker = next(self._names)
        self._hosts[worker] = host
        return worker

    def _with_hosts(self, workers: Sequence[str]) -> tuple[tuple[str, str], ...]:
        return tuple((worker, self._hosts[worker]) for worker in workers)
