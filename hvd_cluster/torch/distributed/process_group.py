"""The process group of the backend "hvd" of torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch.autograd.graph import increment_version

from collectives import Buffer, Destination, InvalidRequestError, Operation, ReduceOp, Watch, Work
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction
from hvd_cluster.ops.submission import submit, submit_group
from hvd_cluster.torch.distributed.collective_work import CollectiveWork
from hvd_cluster.torch.distributed.group_engine import GroupEngine
from hvd_cluster.torch.tensors import as_input, in_place, require_writable, to_buffer

Tensors = Sequence[torch.Tensor]

NAME = "hvd"
NAMES = 16
"""The number of names for collectives of one kind and size; then they repeat."""
MOST_KINDS = 4096
"""The number of kinds and sizes whose names are counted; then all begin anew."""
_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
}


def reduction_of(op: Any) -> Reduction:
    """The reduction for ``op`` of torch. Raises InvalidRequestError for one that the engine does not have."""
    for known, own in _OPS.items():
        if op == known:
            return Reduction(own)
    allowed = ", ".join(str(known).rpartition(".")[2] for known in _OPS)
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    raise InvalidRequestError(f"{name} is not a reduction of the backend {NAME!r}; use one of {allowed}")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as a row, in its own memory if they are dense."""
    return as_input(tensor).reshape(-1)


def _into(tensor: torch.Tensor, source: torch.Tensor) -> tuple[Destination, Callable[[], None]]:
    """A destination for elements like those of ``source`` in ``tensor``, and what to do when they are there.

    A dense tensor is the destination itself, in whatever shape the engine wants. Where other ranks send more or fewer
    elements, they go elsewhere, and the second function raises InvalidRequestError. So does this for another dtype.
    """
    require_writable(tensor)
    if tensor.dtype is not source.dtype:
        raise InvalidRequestError(
            f"the output of shape {tuple(tensor.shape)} is {tensor.dtype}, but the input {source.dtype}; give tensors "
            "of one dtype"
        )
    own = tensor.detach()
    dense = own if own.is_contiguous() else torch.empty_like(own, memory_format=torch.contiguous_format)
    received = [dense.numel()]

    def allocate(shape: tuple[int, ...]) -> Buffer:
        received[0] = math.prod(shape)
        return to_buffer(dense.view(shape) if received[0] == dense.numel() else dense.new_empty(shape))

    def finish() -> None:
        if received[0] != dense.numel():
            raise InvalidRequestError(
                f"{received[0]} elements came from the other ranks, but the output of shape {tuple(tensor.shape)} has "
                f"{dense.numel()}; let the splits and the outputs of all ranks fit"
            )
        if dense is not own:
            own.copy_(dense)
        elif not tensor.is_inference():  # which has no version
            increment_version(tensor)

    return allocate, finish


def _cut(row: torch.Tensor, counts: Sequence[int], parts: Tensors) -> None:
    """Copy a row, with ``counts`` elements of each rank, into ``parts``. Raises InvalidRequestError."""
    for rank, (count, part) in enumerate(zip(counts, parts, strict=True)):
        if count != part.numel():
            raise InvalidRequestError(
                f"rank {rank} of the group has sent {count} elements, but the output for it, of shape "
                f"{tuple(part.shape)}, has {part.numel()}; give outputs of the sizes that the ranks send"
            )
    for part, elements in zip(parts, torch.split(row, list(counts)), strict=True):
        part.detach().copy_(elements.view(part.shape))


# Torch's own class says of one name what it allows, and calls others.
_Base: Any = dist.ProcessGroup


class HvdProcessGroup(_Base):  # type: ignore[misc]
    """Collectives of torch.distributed on an engine of their own; docs/torch-distributed.md has a table.

    The n-th collective of a kind is the same one on all ranks: torch numbers none.
    """

    def __init__(self, group: GroupEngine, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group
        self._names = {"name": "", "desc": ""}
        self._sequence = 0
        self._counts: dict[tuple[Operation, str], int] = {}
        self._latest: dict[tuple[Operation, str], Sequence[Work]] = {}

    # Names, and the end.

    def getBackendName(self) -> str:
        """That of the backend."""
        return NAME

    def setGroupName(self, name: str) -> None:
        """Torch finds the group by ``name``."""
        self._names["name"] = name

    def getGroupName(self) -> str:
        """The name that torch has given."""
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        """Set the description."""
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        """The description that torch has given."""
        return self._names["desc"]

    @property
    def group_name(self) -> str:
        """See :meth:`getGroupName`."""
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        """See :meth:`getGroupDesc`."""
        return self._names["desc"]

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """End the engine, as ``destroy_process_group()`` does."""
        self._group.close()

    # Reductions and copies.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine ``tensors`` over the ranks, in place."""
        how = reduction_of(opts.reduceOp) if opts is not None else PLAIN_SUM
        return self._in_place(Operation.ALLREDUCE, tensors, opts, how)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """As :meth:`allreduce`, but only the tensors of the root change."""
        if self.rank() == opts.rootRank:
            return self._in_place(Operation.ALLREDUCE, tensors, opts, reduction_of(opts.reduceOp))
        copies = [as_input(tensor).clone() for tensor in tensors]
        return self._in_place(Operation.ALLREDUCE, copies, opts, reduction_of(opts.reduceOp))

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Overwrite ``tensors`` with those of the root."""
        return self._in_place(Operation.BROADCAST, tensors, opts, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Done when all ranks have called it."""
        return self._in_place(Operation.ALLREDUCE, [torch.zeros(1, dtype=torch.uint8, device="cpu")], opts)

    def _in_place(
        self, operation: Operation, tensors: Tensors, opts: Any, how: Reduction = PLAIN_SUM, root: int = -1
    ) -> dist.Work:
        operands = [in_place(tensor) for tensor in tensors]
        works = self._submit(operation, [operand[:2] for operand in operands], opts, how, root)

        def finish() -> None:
            for operand, work in zip(operands, works, strict=True):
                operand.finish(work)

        return self._started(works, finish, tensors)

    # Gathering.

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """The elements of ``input`` of all ranks, in ``output``."""
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """As :meth:`_allgather_base`, for several tensors at once."""
        for output, input in zip(outputs, inputs, strict=True):
            _require_elements(output, input.numel() * self.size(), "the output of an allgather")
        return self._gather(Operation.ALLGATHER, [_flat(each) for each in inputs], outputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, opts: Any = None) -> dist.Work:
        """The tensors of all ranks, in the list of each input. They may have different sizes."""
        for parts in outputs:
            self._require_each(parts, "outputs of an all_gather")
        return self._gather_apart(outputs, [(_flat(each), ()) for each in inputs], Operation.ALLGATHER, opts)

    def allgather_coalesced(
        self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """As :meth:`allgather`, with a list of tensors for each rank."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def gather(self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, opts: Any) -> dist.Work:
        """As :meth:`allgather`, on the root only."""
        flat = [_flat(each) for each in inputs]
        sent = [(each, self._only(opts.rootRank, each.numel())) for each in flat]
        is_root = self.rank() == opts.rootRank
        if is_root:
            self._require_each(outputs[0], "outputs of a gather")
        return self._gather_apart(outputs if is_root else [[]], sent, Operation.ALLTOALL, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[list[torch.Tensor]], opts: Any) -> dist.Work:
        """The root's ``inputs[0][r]`` in the output of rank r."""
        [output] = outputs
        if self.rank() != opts.rootRank:
            return self._exchange([output], [output.new_empty(0)], [0] * self.size(), opts)
        self._require_each(inputs[0], "inputs of a scatter")
        return self._exchange([output], inputs[0], [each.numel() for each in inputs[0]], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """``inputs[r]`` goes to rank r, and ``outputs[r]`` comes from there."""
        self._require_each(inputs, "inputs of an all_to_all")
        self._require_each(outputs, "outputs of an all_to_all")
        return self._exchange(outputs, inputs, [each.numel() for each in inputs], opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Rows of ``input`` to each rank; without splits equally many."""
        row = input[:1].numel() if input.dim() else 1
        if not input_splits:
            _require_divisible(input, self.size(), "alltoall")
        splits = [count * row for count in input_splits] or [input.numel() // self.size()] * self.size()
        return self._exchange([output], [input], splits, opts)

    all_to_all_single = alltoall_base

    def _require_each(self, tensors: Tensors, what: str) -> None:
        if len(tensors) != self.size():
            raise InvalidRequestError(
                f"the list of {what} has {len(tensors)} tensors, but the group {self.size()} ranks; give one for each"
            )

    def _only(self, root: int, count: int) -> tuple[int, ...]:
        return tuple(count if rank == root else 0 for rank in range(self.size()))

    def _exchange(self, outputs: Tensors, inputs: Tensors, splits: Sequence[int], opts: Any) -> dist.Work:
        source = torch.cat([_flat(each) for each in inputs]) if len(inputs) > 1 else _flat(inputs[0])
        if len(outputs) == 1:
            return self._gather(Operation.ALLTOALL, [source], outputs, opts, tuple(splits))
        return self._gather_apart([list(outputs)], [(source, tuple(splits))], Operation.ALLTOALL, opts)

    def _gather(
        self, operation: Operation, sources: Tensors, outputs: Tensors, opts: Any, splits: tuple[int, ...] = ()
    ) -> dist.Work:
        places = [_into(output, source) for output, source in zip(outputs, sources, strict=True)]
        pairs = [(to_buffer(each), destination) for each, (destination, _) in zip(sources, places, strict=True)]
        works = self._submit(operation, pairs, opts, splits=splits, is_uneven=operation is Operation.ALLTOALL)

        def finish() -> None:
            for _, copy in places:
                copy()

        return self._started(works, finish, outputs)

    def _gather_apart(
        self,
        outputs: Sequence[list[torch.Tensor]],
        sources: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
        operation: Operation,
        opts: Any,
    ) -> dist.Work:
        """Each source into a list of tensors: by a row with all elements, which is cut."""

        def allocate(like: torch.Tensor, shape: tuple[int, ...]) -> Buffer:
            return to_buffer(like.new_empty(shape))

        works: list[Work] = []
        for source, splits in sources:
            pair = to_buffer(source), partial(allocate, source)
            works += self._submit(operation, [pair], opts, splits=splits, is_uneven=True)

        def finish() -> None:
            for work, parts in zip(works, outputs, strict=True):
                if parts:
                    _cut(work.result().owner, work.received_splits, parts)

        return self._started(works, finish, [part for parts in outputs for part in parts])

    # Reducing and scattering.

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """This rank's part of the combined ``input``, in ``output``."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """As :meth:`_reduce_scatter_base`, for several tensors at once."""
        for output, input in zip(outputs, inputs, strict=True):
            _require_elements(input, output.numel() * self.size(), "the input of a reduce_scatter")
        how = reduction_of(opts.reduceOp) if opts is not None else PLAIN_SUM
        if how.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise InvalidRequestError(f"reduce_scatter has no {how.op.name}; use SUM or AVG, or all_reduce")
        matrices = [_flat(each).view(self.size(), -1) for each in inputs]
        places = [_into(output, matrix) for output, matrix in zip(outputs, matrices, strict=True)]
        pairs = [(to_buffer(each), destination) for each, (destination, _) in zip(matrices, places, strict=True)]
        works = self._submit(Operation.REDUCESCATTER, pairs, opts, how)

        def finish() -> None:
            for _, copy in places:
                copy()

        return self._started(works, finish, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[list[torch.Tensor]], opts: Any) -> dist.Work:
        """The combination of the tensors number r of all ranks, in the output of rank r."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._require_each(parts, "inputs of a reduce_scatter")
            for part in parts:
                _require_elements(part, output.numel(), "a part of a reduce_scatter")
        return self.reduce_scatter_tensor_coalesced(
            outputs, [torch.cat([_flat(part) for part in parts]) for parts in inputs], opts
        )

    # Refused.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> NoReturn:
        """Refused."""
        _refuse("send")

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> NoReturn:
        """Refused."""
        _refuse("recv")

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> NoReturn:
        """Refused."""
        _refuse("recv")

    # The engine.

    def _submit(
        self,
        operation: Operation,
        pairs: Sequence[tuple[Buffer, Destination]],
        opts: Any,
        how: Reduction = PLAIN_SUM,
        root: int = -1,
        splits: tuple[int, ...] = (),
        is_uneven: bool = False,
    ) -> Sequence[Work]:
        """Start the collective, and end it where ``opts`` says that the caller waits."""
        self._sequence += 1
        engine, everyone = self._group.engine, global_process_set
        name = self._name(operation, pairs, is_uneven)
        if len(pairs) > 1:
            works = submit_group(operation, pairs, name, everyone, how, engine=engine, root_rank=root)
        else:
            waits = not getattr(opts, "asyncOp", True)
            [(source, destination)] = pairs
            works = [submit(operation, source, destination, name, everyone, how, waits, engine, root, splits)]
        self._latest = {key: given for key, given in self._latest.items() if not all([work.done for work in given])}
        self._latest[operation, name] = works
        return works

    def _name(self, operation: Operation, pairs: Sequence[tuple[Buffer, Destination]], is_uneven: bool) -> str:
        """The n-th collective of the same kind, dtype and size is the same one on all ranks.

        So the names of a step are those of the step before, which the engine knows already. A name may be in flight
        once: then this waits for the earlier one.
        """
        kind = _described(pairs, is_uneven)
        if len(self._counts) >= MOST_KINDS:  # on all ranks at the same call
            self._counts.clear()
        number = self._counts[operation, kind] = (self._counts.get((operation, kind), -1) + 1) % NAMES
        name = f"{kind}.{number}"
        for work in self._latest.pop((operation, name), ()):
            if not work.done:
                self._group.engine.await_any(Watch([work]))
        return name

    def _started(self, works: Sequence[Work], finish: Callable[[], None], outputs: Tensors) -> CollectiveWork:
        return CollectiveWork(self._group.engine, works, finish, outputs)


def _described(pairs: Sequence[tuple[Buffer, Destination]], is_uneven: bool) -> str:
    """The same text on all ranks; the sizes of an uneven collective are not in it, because ranks may have others."""
    dtype = pairs[0][0].dtype.name.lower()
    sizes = "+".join(str(math.prod(source.shape)) for source, _ in pairs)
    return f"{dtype}.uneven" if is_uneven else f"{dtype}[{sizes}]"


def _refuse(function: str) -> NoReturn:
    raise InvalidRequestError(
        f"{function}() is not available in the backend {NAME!r}, whose engine has collectives only; make a group for "
        'it with dist.new_group(backend="gloo"), or use all_to_all'
    )


def _require_elements(tensor: torch.Tensor, count: int, what: str) -> None:
    if tensor.numel() != count:
        shape = tuple(tensor.shape)
        raise InvalidRequestError(f"{what} has {tensor.numel()} elements, of shape {shape}, but needs {count}")


def _require_divisible(tensor: torch.Tensor, size: int, function: str) -> None:
    rows = len(tensor) if tensor.dim() else 1
    if rows % size:
        raise InvalidRequestError(
            f"{function} of a tensor with {rows} rows cannot give {size} ranks equally many; give splits"
        )
