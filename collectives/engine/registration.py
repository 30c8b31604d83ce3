"""The registration of a new process set on one rank, and the backends of a process set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from collectives.api import Request, UnsupportedRequestError, override
from collectives.backends.base import Backend, OffersVote, Vote
from collectives.engine.work import Work


@dataclass(frozen=True, slots=True)
class SetBackends:
    """How this rank works together with the other members of a process set.

    ``by_device`` has a backend for each kind of device; ``vote`` is how the members agree without the coordinator,
    None if no backend offers one.
    """

    by_device: Mapping[str, Backend]
    vote: Vote | None = None

    @classmethod
    def of(cls, backends: Iterable[Backend]) -> SetBackends:
        """Those of ``backends``, with the vote that one of them offers."""
        kinds = {backend.device: backend for backend in backends}
        offers = [backend for backend in kinds.values() if isinstance(backend, OffersVote)]
        return cls(kinds, offers[0].vote() if offers else None)

    def backend(self, request: Request) -> Backend:
        """The backend for the device of ``request``; UnsupportedRequestError if there is none."""
        backend = self.by_device.get(request.device)
        if backend is None or backend.absence:
            raise UnsupportedRequestError(
                f"{request.operation.value} {request.name!r}: the tensor is on {request.device}, and "
                f"{self._reason(request, backend)}; or move the tensor to the CPU first, for example with tensor.cpu()"
            )
        return backend

    def _reason(self, request: Request, backend: Backend | None) -> str:
        if backend is not None:
            return backend.absence
        return f"process set {request.process_set} has backends for {', '.join(self.by_device)} only"


class Formation(Protocol):
    """This rank's part in the connecting of a new process set."""

    def prepare(self) -> bytes:
        """Open the addresses of this rank, and return them for the other members. Call it once."""

    def connect(self, offers: Sequence[bytes], check: Callable[[], None]) -> SetBackends:
        """The backends of the set; ``offers`` are those of its members. Call it once.

        ``check`` raises when the job has ended; it is called often.
        """

    def close(self) -> None:
        """Release the addresses, at any time. Idempotent."""


Form: TypeAlias = Callable[[Sequence[int]], Formation]
"""The members of a new process set -> the formation of this rank, which is one of them. It holds nothing yet."""


class Registration(Work):
    """The work that adds a process set; owns ``formation``, None as long as there is none, and on other ranks."""

    __slots__ = ("formation",)

    def __init__(self, request: Request) -> None:
        super().__init__(request, None, None)
        self.formation: Formation | None = None

    @override
    def finish(self) -> None:
        super().finish()
        self.close()

    @override
    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.close()

    def close(self) -> None:
        """Release the addresses of this rank. Idempotent."""
        if self.formation is not None:
            self.formation.close()
