"""Groups of torch tensors, handles, and operations without a tensor: the compiler goes around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from collectives.api import Operation
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import as_group
from hvd_cluster.ops.submission import Describe, HandleGroup, Kind
from hvd_cluster.torch.operations.autograd import collective, uncompiled
from hvd_cluster.torch.tensors import require_tensor

poll = uncompiled(submission.poll, __name__)
synchronize = uncompiled(submission.synchronize, __name__)
run_all = uncompiled(submission.run_all, __name__)


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Iterable[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results."""
    return submission.start_group(operation, describe, listed(tensors), kind, name, process_set, **fields)


def listed(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of a group; InvalidRequestError for one tensor, and for anything else in the list."""
    return as_group(tensors, torch.Tensor, require_tensor)


barrier = collective(Operation.BARRIER, home=__name__)(submission.barrier)
join = collective(Operation.JOIN, home=__name__)(submission.join)
