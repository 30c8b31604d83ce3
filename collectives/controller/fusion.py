"""Pure planning: ready collectives -> batches that run as one exchange."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod

from collectives.api import Operation
from collectives.controller.messages import Response

FUSIBLE = frozenset({Operation.ALLREDUCE, Operation.ALLGATHER, Operation.REDUCESCATTER})


def plan(ready: Sequence[Response], threshold: int, isolate_groups: bool = False) -> list[list[Response]]:
    """Group ``ready`` into batches of at most ``threshold`` bytes; 0 turns fusion off.

    Only tensors that agree in process set, device, dtype, operation, op and scales share a batch; an allgather moves
    bytes, so there process set and device suffice. Its size is that of the result, else that of the tensor. A tensor
    joins the newest batch of its kind even when others lie between them (look-ahead): ready tensors do not depend on
    each other. A tensor larger than the threshold has a batch of its own. All tensors of a group count as ready with
    its first. With ``isolate_groups`` those of one kind are one batch of their own, of any size. Batches keep the order
    of their first tensors.
    """
    if len(ready) == 1:
        return [list(ready)]
    batches: list[list[Response]] = []
    newest: dict[Hashable, tuple[list[Response], int]] = {}
    for response in _groups_together(ready):
        whole = isolate_groups and response.request.group != ""
        kind, nbytes = _kind(response, isolate_groups), _nbytes(response)
        batch, filled = newest.get(kind, ([], 0))
        fits = batch and (whole or (threshold and filled + nbytes <= threshold))
        if response.request.operation not in FUSIBLE or not fits:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(response)
        newest[kind] = (batch, filled + nbytes)
    return batches


def _groups_together(ready: Iterable[Response]) -> list[Response]:
    """Move each group to the place of its first tensor."""
    groups: dict[Hashable, list[Response]] = {}
    for index, response in enumerate(ready):
        request = response.request
        group: Hashable = (request.process_set, request.group) if request.group else index
        groups.setdefault(group, []).append(response)
    return [response for members in groups.values() for response in members]


def _nbytes(response: Response) -> int:
    request = response.request
    if request.operation is Operation.ALLGATHER:
        return sum(response.sizes) * prod(request.shape[1:]) * request.dtype.itemsize
    return request.nbytes


def _kind(response: Response, isolate_groups: bool) -> Hashable:
    request = response.request
    where = (request.operation, request.process_set, request.device, request.group if isolate_groups else "")
    if request.operation is Operation.ALLGATHER:
        return where
    return (*where, request.dtype, request.op, request.prescale_factor, request.postscale_factor)
