"""Pure planning: ready collectives -> batches that run as one exchange."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from collectives.api import Operation
from collectives.messages import Response

__all__ = ["plan"]

FUSIBLE = frozenset({Operation.ALLREDUCE})


def plan(ready: Iterable[Response], threshold: int) -> list[list[Response]]:
    """Group ``ready`` into batches of at most ``threshold`` bytes; 0 turns fusion off.

    Only tensors that agree in process set, device, dtype, operation, op and scales share a batch. A tensor joins the
    newest batch of its kind even when others lie between them (look-ahead): ready tensors do not depend on each
    other. A tensor larger than the threshold has a batch of its own. Batches keep the order of their first tensors.
    """
    batches: list[list[Response]] = []
    newest: dict[Hashable, tuple[list[Response], int]] = {}
    for response in ready:
        request = response.request
        kind = _kind(response)
        batch, filled = newest.get(kind, ([], 0))
        fits = batch and threshold and filled + request.nbytes <= threshold
        if request.operation not in FUSIBLE or not fits:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(response)
        newest[kind] = (batch, filled + request.nbytes)
    return batches


def _kind(response: Response) -> Hashable:
    request = response.request
    return (
        request.operation,
        request.process_set,
        request.device,
        request.dtype,
        request.op,
        request.prescale_factor,
        request.postscale_factor,
    )
