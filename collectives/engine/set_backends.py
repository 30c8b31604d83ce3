"""The backends of a process set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from collectives.api import Request, UnsupportedRequestError
from collectives.backends.base import Backend
from collectives.planning.board import Board, OffersBoard

__all__ = ["SetBackends"]


@dataclass(frozen=True, slots=True)
class SetBackends:
    """How this rank works together with the other members of a process set.

    ``by_device`` has a backend for each kind of device; ``board`` is where the members agree without the coordinator,
    None if no backend offers one.
    """

    by_device: Mapping[str, Backend]
    board: Board | None = None

    @classmethod
    def of(cls, backends: Iterable[Backend]) -> SetBackends:
        """Those of ``backends``, with the board that one of them offers."""
        kinds = {backend.device: backend for backend in backends}
        offers = [backend for backend in kinds.values() if isinstance(backend, OffersBoard)]
        return cls(kinds, offers[0].board() if offers else None)

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
