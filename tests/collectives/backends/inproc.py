"""Ranks as threads of one process: deterministic, bounded, and with faults where a test asks for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.api import CollectiveTimeoutError, EngineError, PeerLostError, ShutDownError, override
from collectives.backends.base import Call, Group, OffersVote, OnMissing, Vote
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.transport import parts
from collectives.kernels.reduction import ReductionKernel
from collectives.kernels.segments import Segments

SLICE_SECONDS = 0.005

Fault = Exception | Callable[[], None]
"""An exception to raise, or something to call, before a rank takes part in one of its calls."""


class _Call:
    """One collective: the arguments of each rank. It is complete when every rank has called it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[int, object] = {}
        self.payloads: dict[int, Any] = {}

    @property
    def complete(self) -> bool:
        return len(self.payloads) == self.size

    def verify(self) -> None:
        """Refuse different calls: negotiation promises that all members make the same one."""
        if len(set(self.calls.values())) > 1:
            raise EngineError(f"the members called different things, by rank: {dict(sorted(self.calls.items()))}")


class InprocGroup:
    """The state that the threads share. One lock, one wake-up per collective.

    ``faults[rank, step]`` strikes when ``rank`` makes its call number ``step`` (its first is 0; ``close`` and
    ``abort`` do not count). An exception kills the member: it is raised there, and the others lose a peer.
    ``fired[rank, step]`` counts how often each fault struck.
    """

    def __init__(self, size: int, faults: Mapping[tuple[int, int], Fault] | None = None) -> None:
        self.size = size
        self.fired: Counter[tuple[int, int]] = Counter()
        self._faults = dict(faults or {})
        self._changed = threading.Condition()
        self._call = _Call(size)
        self._rounds: list[dict[int, int]] = []
        self._come = [0] * size
        self._failures: dict[int, Exception] = {}
        self._lost: dict[int, str] = {}

    def strike(self, rank: int, step: int) -> None:
        """Let the fault planned for this call happen."""
        fault = self._faults.get((rank, step))
        if fault is None:
            return
        with self._changed:
            self.fired[rank, step] += 1
        if isinstance(fault, Exception):
            raise fault
        fault()

    def fail(self, member: Group, error: Exception) -> None:
        """Make every call of ``member`` raise ``error`` from now on; its peers lose it. Only the first error counts."""
        rank = member.position
        with self._changed:
            self._failures.setdefault(rank, error)
            self._lost.setdefault(rank, f"{member.describe([rank])} left: {error}")
            self._changed.notify_all()

    def exchange(self, member: Group, call: object, payload: object, timeout: float) -> list[Any]:
        """Add ``payload``, wait for the others, and return the payloads of all, in rank order."""
        rank = member.position
        with self._changed:
            current = self._call
            self._raise_failure(rank)
            current.calls[rank], current.payloads[rank] = call, payload
            if current.complete:
                self._call = _Call(self.size)
                self._changed.notify_all()
            self._changed.wait_for(lambda: current.complete or rank in self._failures or bool(self._lost), timeout)
            self._raise_unless_complete(member, current, timeout)
        current.verify()
        return [current.payloads[position] for position in range(self.size)]

    def come(self, rank: int, value: int) -> dict[int, int]:
        """Add ``value`` to the next round of ``rank``; returns the values of that round, by rank, which may grow."""
        with self._changed:
            if self._come[rank] == len(self._rounds):
                self._rounds.append({})
            values = self._rounds[self._come[rank]]
            self._come[rank] += 1
            values[rank] = value
            self._changed.notify_all()
            return values

    def agreed(self, rank: int, values: dict[int, int]) -> bool | None:
        """Whether all ranks gave the same value; None when that is undecided after a few milliseconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict(values) is not None or bool(self._lost), SLICE_SECONDS)
            self._raise_failure(rank)
            return self._verdict(values)

    def _verdict(self, values: dict[int, int]) -> bool | None:
        if len(set(values.values())) > 1:
            return False
        return True if len(values) == self.size else None

    def _raise_unless_complete(self, member: Group, current: _Call, timeout: float) -> None:
        rank = member.position
        if rank in self._failures:
            raise self._failures[rank]
        if current.complete:
            return
        self._raise_failure(rank)
        missing = sorted(set(range(self.size)) - set(current.payloads))
        text = f"{member.describe(missing)} did not enter the operation within {timeout:g} s; look at its output"
        raise CollectiveTimeoutError(text, member.ranks_at(missing))

    def _raise_failure(self, rank: int) -> None:
        if rank in self._failures:
            raise self._failures[rank]
        if self._lost:
            raise PeerLostError(next(iter(self._lost.values())))


class _InprocVote(Vote):
    """The vote of member ``rank``, in the memory that the threads share."""

    def __init__(self, rank: int, group: InprocGroup) -> None:
        self._rank = rank
        self._group = group

    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        values = self._group.come(self._rank, value)
        while (verdict := self._group.agreed(self._rank, values)) is None:
            waiting([rank for rank in range(self._group.size) if rank not in values])
        if verdict:
            agreed()
            call()
        return verdict

    def decline(self) -> None:
        self._group.come(self._rank, 0)


class InprocBackend(HostBackend, OffersVote):
    """A member of ``group``; all members are threads and have one ``shared``.

    Sources are copied when published, so one rendezvous per operation suffices.
    """

    name = "inproc"

    def __init__(self, group: Group, shared: InprocGroup, timeout: float = 30.0) -> None:
        super().__init__(group)
        self._shared = shared
        self._timeout = timeout
        self._step = 0

    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        call = ("allreduce", tuple(source.size for source in sources), how)
        members = self._exchange(call, [source.copy() for source in sources])
        for index, destination in enumerate(destinations):
            how.combine_silently(destination, [member[index] for member in members])

    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        members = self._exchange(("reducescatter", tuple(counts), how), np.concatenate(sources))
        mine = parts(counts)[self.rank]
        result = np.empty(counts[self.rank], how.dtype.storage)
        how.combine_silently(result, [member[mine] for member in members])
        Segments(destinations).write(0, result)

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        members = self._exchange(("allgather", tuple(counts)), np.concatenate(sources))
        Segments(destinations).write(0, np.concatenate(members))

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        members = self._exchange(("broadcast", root, destination.size), source.copy() if self.rank == root else None)
        np.copyto(destination, members[root])

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        members = self._exchange(("alltoall",), [source[part].copy() for part in parts(send_counts)])
        np.concatenate([member[self.rank] for member in members], out=destination)

    def wait_for_all(self) -> None:
        self._exchange(("barrier",), None)

    @override
    def vote(self) -> Vote:
        return _InprocVote(self.rank, self._shared)

    def close(self) -> None:
        self._shared.fail(self.group, ShutDownError(f"the backend of rank {self.group.ranks[self.rank]} was closed"))

    def abort(self, error: Exception) -> None:
        self._shared.fail(self.group, error)

    def _exchange(self, call: object, payload: object) -> list[Any]:
        """One rendezvous. A failure here ends the membership, so that the peers do not wait in vain."""
        step, self._step = self._step, self._step + 1
        try:
            self._shared.strike(self.rank, step)
            return self._shared.exchange(self.group, call, payload, self._timeout)
        except Exception as error:
            self._shared.fail(self.group, error)
            raise
