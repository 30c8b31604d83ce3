"""Allreduce between GPUs of several hosts in stages: NCCL inside each host, another backend or NCCL between the hosts.

With H hosts of L members each, and S bytes, each byte crosses the network once for each host:

=============  ===============================================================  ==================
stage          on                                                               bytes of a host
=============  ===============================================================  ==================
reducescatter  the members of the host: each gets its share                     none
allreduce      the first, the second... members of all hosts, for their shares  2 S (H - 1) / H
allgather      the members of the host                                          none
=============  ===============================================================  ==================

All backends launch on the one stream of the GPU, so the stages follow one another there. Between hosts, NCCL makes it a
torus (Mikami et al. 2018), a backend of the host the hierarchical allreduce of Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from collectives.api import DType, HorovodInternalError, Parameters, ReduceOp, override
from collectives.backends.base import Backend, OnDeath, OnWait
from collectives.backends.completion import Completion, all_of
from collectives.backends.nccl.interface import Device
from collectives.buffers import Buffer, as_bytes

Place = Callable[[int], Device]
"""The GPU with the tensor at an address; with 0, that of this rank."""


class StagedBackend(Backend):
    """A member of the group of ``flat``, which has all members, and does everything but allreduce.

    ``local`` has the members of this host, in that order, and ``cross`` those of this column; None for a member that is
    in no column: the hosts have ``columns`` of them. All are owned by this backend, and work on the GPU of ``place``.
    Averages of integers are ``flat``'s, because the sum of a host may not fit their type.
    """

    name = "hierarchical"
    device = "cuda"

    def __init__(self, local: Backend, cross: Backend | None, flat: Backend, columns: int, place: Place) -> None:
        super().__init__(flat.group)
        self.settles_early = flat.settles_early
        self.absence = flat.absence
        self._local, self._cross, self._flat = local, cross, flat
        self._parts = [part for part in (local, cross, flat) if part is not None]
        self._columns = columns
        self._place = place
        self._device: Device | None = None
        self._awaited: list[Completion] = []

    @property
    @override
    def memory(self) -> Device:  # type: ignore[override]
        """It connects nobody: a rank that has joined uses it alone."""
        return self._gpu_of(0)

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        if op is ReduceOp.AVERAGE:
            with self._beginning(self._flat) as flat:
                return flat.allreduce(sources, destinations, op, prescale, postscale)
        dtype, counts = sources[0].dtype, self._shares(sum([source.count for source in sources]))
        mine = self._gpu_of(destinations[0].pointer).empty(dtype, (counts[self._local.group.position],))
        with self._beginning(self._local) as local:
            ends = [local.reducescatter(sources, [mine], counts, op, prescale)]
            if self._cross is not None and mine.count:
                ends.append(self._cross.allreduce([mine], [mine], op, 1.0, postscale))
            nbytes = [count * dtype.itemsize for count in counts]
            ends.append(local.allgather([mine.cast(DType.UINT8)], as_bytes(destinations), nbytes))
        return all_of(ends)  # each knows the failures of its own backend

    @override
    def reducescatter(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        with self._beginning(self._flat) as flat:
            return flat.reducescatter(sources, destinations, counts, op, prescale, postscale)

    @override
    def allgather(self, sources: Sequence[Buffer], destinations: Sequence[Buffer], counts: Sequence[int]) -> Completion:
        with self._beginning(self._flat) as flat:
            return flat.allgather(sources, destinations, counts)

    @override
    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> Completion:
        with self._beginning(self._flat) as flat:
            return flat.broadcast(source, destination, root)

    @override
    def alltoall(
        self, source: Buffer, destination: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Completion:
        with self._beginning(self._flat) as flat:
            return flat.alltoall(source, destination, send_counts, receive_counts)

    @override
    def barrier(self) -> Completion:
        with self._beginning(self._flat) as flat:
            return flat.barrier()

    @override
    def begin_after(self, ready: Completion) -> None:
        self._awaited.append(ready)

    @override
    def attend(self, on_wait: OnWait) -> None:
        for part in self._parts:
            part.attend(on_wait)

    @override
    def waited(self) -> tuple[float, float]:
        late, inside = zip(*[part.waited() for part in self._parts], strict=True)
        return sum(late), sum(inside)

    @override
    def watch(self, on_death: OnDeath) -> None:
        for part in self._parts:
            part.watch(on_death)

    @override
    def adopt(self, parameters: Parameters) -> None:
        for part in self._parts:
            part.adopt(parameters)

    @override
    def close(self) -> None:
        for part in self._parts:
            part.close()

    @override
    def abort(self, error: Exception) -> None:
        for part in self._parts:
            part.abort(error)

    # The parts of an operation.

    @contextmanager
    def _beginning(self, first: Backend) -> Iterator[Backend]:
        """While ``first`` and then other parts launch. A member that fails in one part leaves the others, too."""
        awaited, self._awaited = self._awaited, []
        for ready in awaited:
            first.begin_after(ready)
        try:
            yield first
        except BaseException as error:
            self.abort(error if isinstance(error, Exception) else HorovodInternalError(f"interrupted: {error!r}"))
            raise

    def _gpu_of(self, address: int) -> Device:
        if self._device is None:
            self._device = self._place(address)
        return self._device

    def _shares(self, count: int) -> list[int]:
        """How many of ``count`` elements each member of this host carries between the hosts."""
        share, rest = divmod(count, self._columns)
        carried = [share + (column < rest) for column in range(self._columns)]
        return carried + [0] * (self._local.group.size - self._columns)
