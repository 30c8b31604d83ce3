"""The shard of a rank: its parts of parameters, which lie in one piece of memory, and of gradients and state."""

from __future__ import annotations

import logging
import operator
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from collectives import Buffer, Engine, HorovodInternalError, InvalidRequestError, Operation
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.shards import cut, deal
from hvd_cluster.ops.host_memory import HostMapping, shared_memory
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.refused_calls import refusing
from hvd_cluster.ops.structures import mapped
from hvd_cluster.ops.submission import submit
from hvd_cluster.torch.optimizer.rows import ParameterPart, Portions, dense_strides, in_row
from hvd_cluster.torch.tensors import to_buffer

logger = logging.getLogger(__name__)

NAME = "optimizer.shard"
ELEMENT_WISE = frozenset(
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ]
)
"""Optimizers that compute each element of a parameter from that of its gradient and of its state alone."""
WHOLE = frozenset(filter(None, [torch.optim.Adafactor, getattr(torch.optim, "Muon", None)]))
"""Optimizers that update each parameter from its own gradient and state alone."""
DECLARATION = "hvd_element_wise"
"""The attribute by which another class says that it is of the first kind, with True, or of the second, with False."""
REFUSED: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "computes one direction from all gradients",
    torch.optim.SparseAdam: "needs sparse gradients, which cannot be cut",
}


def is_element_wise(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer of the class ``kind`` may get parts of parameters; a subclass must declare it itself."""
    return bool(vars(kind).get(DECLARATION, kind in ELEMENT_WISE))


def check(optimizer: torch.optim.Optimizer, own: type[torch.optim.Optimizer]) -> None:
    """InvalidRequestError for an optimizer of the class ``own``, or a parameter, that cannot be sharded."""
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise InvalidRequestError(f"{kind.__name__} {reason}, so it cannot be sharded; leave out sharded")
    if own not in ELEMENT_WISE | WHOLE and DECLARATION not in vars(own):
        logger.warning(
            "%s is not known: with sharded each rank gives it some of the parameters, so it must update each parameter "
            "from its own gradient and state alone. If it does, set %s = False in the class",
            own.__name__,
            DECLARATION,
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise InvalidRequestError(
            f"the parameters are on the devices {', '.join(devices)}, but sharded parameters lie in one piece of "
            "memory; make an optimizer for each device"
        )


class ParameterShard:
    """The ``pieces`` of the rank at ``position`` of ``process_set``, and the memory of all ``parameters``.

    A collective: all members make theirs at the same time. ``place``: "host" for memory that they share, "rank" for
    memory of each, True for the first if they can. InvalidRequestError, on all ranks, where their parameters differ in
    any bit, or their memory cannot be shared with "host".
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Mapping[torch.Tensor, str],
        element_wise: bool,
        place: bool | str,
        process_set: ProcessSet,
    ) -> None:
        self.parameters = list(parameters)
        self._process_set = process_set
        self._engine = weakref.ref(basics.engine())
        self._position = position = process_set.rank() or 0
        ranks = process_set.size() or 1
        with refusing(Operation.ALLGATHER, f"{NAME}.digests.t", process_set):
            _require_apart(self.parameters, names)
        _require_equal(self.parameters, names, process_set)
        sizes = [parameter.numel() * parameter.element_size() for parameter in self.parameters]
        self._layout = (cut if element_wise else deal)(sizes, ranks)
        memory, host = _memory(self._layout.nbytes, self.parameters, place, process_set)
        self.is_shared, self._partners = host is not None, () if host is None else host.partners
        self._source = memory
        self._memory = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
        self._own = self._memory[self._layout.bounds[position] : self._layout.bounds[position + 1]]
        self._strides = [dense_strides(parameter) for parameter in self.parameters]
        self._rows = [self._row(memory, number) for number in range(len(self.parameters))]
        self._addresses = [row.data_ptr() for row in self._rows]
        self._fill(host is None or host.is_first)
        for number in range(len(self.parameters)):
            self._move(number)
        self.pieces = [self._piece(*part) for part in self._layout.parts(position)]
        self.whole = {piece.parameter for piece in self.pieces if piece.is_whole}

    def _row(self, memory: Any, number: int) -> torch.Tensor:
        """A storage of its own, if possible: pickle writes the whole storage of a tensor."""
        start = self._layout.offsets[number]
        own = memory[start : start + self._layout.sizes[number]]
        return (own if isinstance(own, torch.Tensor) else torch.from_numpy(own)).view(self.parameters[number].dtype)

    @torch.no_grad()
    def _fill(self, fills: bool) -> None:
        """One rank ``fills`` the memory, for all that share it."""
        for parameter, row, strides in zip(self.parameters, self._rows, self._strides, strict=True):
            if fills:
                row.copy_(in_row(parameter, strides))
        if self.is_shared:
            allgather_object(None, f"{NAME}.filled", self._process_set)

    def _move(self, number: int) -> None:
        """Let the parameter lie in the memory."""
        parameter = self.parameters[number]
        parameter.data = self._rows[number].as_strided(parameter.shape, self._strides[number])
        if self.is_shared:
            _on_host[parameter] = parameter.data_ptr()

    def _piece(self, number: int, start: int, stop: int) -> ParameterPart:
        parameter = self.parameters[number]
        size = parameter.element_size()
        start, stop = start // size, stop // size
        is_whole = stop - start == parameter.numel()
        tensor = parameter if is_whole else self._rows[number][start:stop].requires_grad_()
        return ParameterPart(parameter, start, stop, tensor, self._strides[number])

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return self._layout.nbytes

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks of the world are on one host, and the parameters in its memory."""
        topology = basics.engine().topology
        return self._memory.is_cpu and topology.size == topology.local_size

    @property
    def own_memory(self) -> torch.Tensor:
        """The bytes of this rank's part, in host memory."""
        return self._own.cpu()

    @torch.no_grad()
    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Overwrite the parameters, wherever they lie now; ``parts`` are the bytes of all ranks."""
        memory = torch.cat(list(parts))
        for number, parameter in enumerate(self.parameters):
            row = self._row(memory, number)
            parameter.copy_(row.as_strided(parameter.shape, self._strides[number]))

    @property
    def engine(self) -> Engine | None:
        """That of the world of its ranks, as long as it exists."""
        return self._engine()

    def divides(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether ``parameters`` are those of this shard, in the world in which it was made."""
        if len(parameters) != len(self.parameters) or any(map(operator.is_not, parameters, self.parameters)):
            return False
        fit = all([self._fits(number, parameter) for number, parameter in enumerate(parameters)])
        return fit and self.engine is basics.engine()

    def _fits(self, number: int, parameter: torch.Tensor) -> bool:
        if parameter.data_ptr() == self._addresses[number]:
            return True
        row = self._rows[number]
        if (parameter.dtype, parameter.numel(), parameter.device) != (row.dtype, row.numel(), row.device):
            return False
        return dense_strides(parameter) == self._strides[number]

    @torch.no_grad()
    def take_back(self) -> None:
        """Let parameters that have left the memory lie there again, with the values of this rank's part.

        Their ``.data`` was replaced; or torch.multiprocessing has given their storage, and so the row, other memory.
        """
        for number, parameter in enumerate(self.parameters):
            if parameter.data_ptr() != self._addresses[number]:
                self._return(number)

    def _return(self, number: int) -> None:
        parameter = self.parameters[number]
        values = in_row(parameter, self._strides[number])
        row = self._rows[number] = self._row(self._source, number)
        for piece in self.pieces:  # each rank its own part: another one may have updated the others already
            if piece.parameter is parameter:
                own = row[piece.start : piece.stop].copy_(values[piece.start : piece.stop])
                if not piece.is_whole:
                    piece.tensor.data = own
        self._move(number)

    def portions(self, parameter: torch.Tensor) -> Portions:
        """The elements of ``parameter`` that each rank updates."""
        number = next(place for place, each in enumerate(self.parameters) if each is parameter)
        counts = tuple(nbytes // parameter.element_size() for nbytes in self._layout.counts(number))
        return Portions(counts, self._position, self._strides[number])

    READY = Operation.ALLGATHER, f"{NAME}.ready"
    """The call of :meth:`meet` before an update."""

    def meet(self, name: str) -> None:
        """Wait until all members have called this with ``name``. HorovodInternalError if one has joined."""
        self._gather(name, torch.zeros(1, dtype=torch.uint8, device="cpu"), None, self._process_set.size() or 1)

    @property
    def end(self) -> tuple[Operation, str]:
        """The collective by which :meth:`publish` begins: its operation, and its name."""
        if self._partners:
            return Operation.ALLTOALL, f"{NAME}.between"
        return Operation.ALLGATHER, f"{NAME}.updated" if self.is_shared else NAME

    def publish(self) -> None:
        """Wait until all members have updated their parts, and get those that lie elsewhere.

        HorovodInternalError if a member has joined: then nobody has updated its part.
        """
        if self._partners:
            self._exchange()
        if self.is_shared:
            self.meet(f"{NAME}.updated")
        else:
            self._gather(self.end[1], self._own.clone(), self._memory, self._layout.nbytes)
        increment_version(self.parameters)

    def _exchange(self) -> None:
        """Between hosts: each member gets the parts of its partners, for all members of its host."""
        size, bounds, (operation, name) = self._process_set.size() or 1, self._layout.bounds, self.end
        splits = tuple(len(self._own) if position in self._partners else 0 for position in range(size))
        source = to_buffer(self._own.repeat(len(self._partners)))
        work = submit(operation, source, _new_bytes, name, self._process_set, wait=True, splits=splits)
        work.outcome()
        parts = [self._memory[bounds[position] : bounds[position + 1]] for position in self._partners]
        received, start = work.result().owner, 0
        if len(received) != sum(map(len, parts)):
            return  # a partner has joined: the meeting that follows is an error on all ranks
        for part in parts:
            part.copy_(received[start : start + len(part)])
            start += len(part)

    def _gather(self, name: str, own: torch.Tensor, memory: torch.Tensor | None, expected: int) -> None:
        """Into ``memory``, if there is one, and if the bytes are as many as ``expected``."""
        received = [0]

        def destination(shape: tuple[int, ...]) -> Buffer:
            received[0] = shape[0]
            fits = memory is not None and shape[0] == expected
            return to_buffer(memory if memory is not None and fits else own.new_empty(shape))

        submit(Operation.ALLGATHER, to_buffer(own), destination, name, self._process_set, wait=True).outcome()
        if received[0] != expected:
            raise HorovodInternalError(
                "a rank has called join(), so its part of the sharded parameters was not updated in this step; let all "
                "ranks make equally many steps, or leave out sharded, and go on from a checkpoint"
            )


_on_host: Any = WeakTensorKeyDictionary()
"""The addresses of parameters that were moved to the memory that ranks share."""


def own_memory(parameters: Iterable[torch.Tensor]) -> None:
    """Give this rank memory of its own for each of ``parameters`` that it shares with others."""
    for parameter in parameters:
        if parameter in _on_host and _on_host.pop(parameter) == parameter.data_ptr():
            parameter.data = parameter.data.clone()


def _memory(
    nbytes: int, parameters: Sequence[torch.Tensor], place: bool | str, process_set: ProcessSet
) -> tuple[torch.Tensor | npt.NDArray[np.uint8], HostMapping | None]:
    """``nbytes`` of bytes, an array in host memory, which is the second result if the members of a host share it."""
    on_host = all([parameter.is_cpu for parameter in parameters])
    problem = "" if on_host else "the parameters are not in host memory"
    if place != "rank" and on_host:
        shared, problem = shared_memory(nbytes, NAME, process_set, each_host=True)
        if shared is not None:
            logger.info("%s: %d bytes of parameters lie once on this host", NAME, nbytes)
            return shared.memory, shared
    if place == "host":
        raise InvalidRequestError(f'sharded="host" needs ranks that share memory: {problem}; give sharded=True')
    logger.info("%s: each rank has its own %d bytes of parameters. %s", NAME, nbytes, problem)
    if on_host:
        return np.zeros(nbytes, np.uint8), None
    return torch.zeros(nbytes, dtype=torch.uint8, device=parameters[0].device), None


def _new_bytes(shape: tuple[int, ...]) -> Buffer:
    return to_buffer(torch.empty(shape, dtype=torch.uint8, device="cpu"))


def _require_apart(parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """InvalidRequestError where two parameters have memory in common, which they would not have any more."""
    placed = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size(), names[parameter])
        for parameter in parameters
        if parameter.numel()
    )
    for (_, stop, one), (start, _, other) in pairwise(placed):
        if start < stop:
            raise InvalidRequestError(
                f"the parameters {one!r} and {other!r} lie in the same memory; let the model use one parameter in both "
                "places, or leave out sharded"
            )


def _require_equal(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], process_set: ProcessSet
) -> None:
    own = [_digest(parameter) for parameter in parameters]
    digests = allgather_object(own, f"{NAME}.digests", process_set)
    for index, parameter in enumerate(parameters):
        if any(each[index : index + 1] != own[index : index + 1] for each in digests):
            raise InvalidRequestError(
                f"the parameter {names[parameter]!r} is not the same on all ranks, but each rank updates a part of it; "
                "give it the same memory format, and call broadcast_parameters(model.state_dict(), root_rank=0) before "
                "the first step"
            )
    if any(len(each) != len(own) for each in digests):
        raise InvalidRequestError(
            f"the ranks have {[len(each) for each in digests]} parameters; give all ranks the same model"
        )


def _digest(parameter: torch.Tensor) -> bytes:
    row = in_row(parameter, dense_strides(parameter)).cpu()
    description = f"{parameter.dtype} {tuple(parameter.shape)} {dense_strides(parameter)}".encode()
    return blake2b(row.view(torch.uint8).numpy().data, key=description[:64]).digest()


class StatePart(NamedTuple):
    """The state of the elements ``start`` to ``stop`` of the parameter of this ``number``."""

    number: int
    start: int
    stop: int
    state: Any


def require_shapes(state: Any, parameter: torch.Tensor, name: str) -> None:
    """Refuse a ``state`` of the ``parameter`` called ``name`` that an element-wise optimizer cannot have.

    InvalidRequestError unless each tensor has one element, or the shape of the parameter.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            raise InvalidRequestError(
                f"the state {key} of {name!r} has the shape {tuple(value.shape)}, and the parameter "
                f"{tuple(parameter.shape)}; load the state of the same model, or leave out sharded"
            )


def cut_state(state: Any, piece: ParameterPart) -> Any:
    """The part of the ``state`` of a parameter that belongs to ``piece``: tensors of its shape are cut."""
    return state if piece.is_whole else {key: _cut_value(value, piece) for key, value in state.items()}


def _cut_value(value: Any, piece: ParameterPart) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return piece.part_of(value).clone() if value.shape == piece.parameter.shape else value.clone()


def joined_states(parameters: Sequence[torch.Tensor], gathered: Iterable[Iterable[StatePart]]) -> dict[Any, Any]:
    """The state of each of ``parameters`` that has one, from the parts of all ranks."""
    parts: dict[int, list[StatePart]] = defaultdict(list)
    for part in [part for each in gathered for part in each]:
        parts[part.number].append(part)
    return {parameters[number]: joined_state(parameters[number], each) for number, each in sorted(parts.items())}


@dataclass(frozen=True)
class PackedTensor:
    """The bytes of a dense tensor, as pickle can leave them out."""

    data: npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def packed_tensor(leaf: Any) -> Any:
    """A tensor in host memory, packed; any other ``leaf`` as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = dense_strides(leaf)
    return PackedTensor(in_row(leaf, strides).view(torch.uint8).numpy(), leaf.dtype, tuple(leaf.shape), strides)


def unpacked_tensor(leaf: Any) -> Any:
    """The opposite of :func:`packed_tensor`, in the same memory."""
    if not isinstance(leaf, PackedTensor):
        return leaf
    return torch.from_numpy(leaf.data).view(leaf.dtype).as_strided(leaf.shape, leaf.strides)


def joined_state(parameter: torch.Tensor, parts: Iterable[StatePart]) -> Any:
    """The state of all of ``parameter``, from those of its ``parts``, which are all there."""
    ordered = sorted(parts, key=lambda part: part.start)
    first = ordered[0]
    if first.stop - first.start == parameter.numel():
        return mapped(first.state, lambda value: _placed(value, parameter))
    return {key: _joined_value(key, value, parameter, ordered) for key, value in first.state.items()}


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Tensors travel through the host; single numbers stay there, as torch has them."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value


def _joined_value(key: Any, value: Any, parameter: torch.Tensor, parts: Sequence[StatePart]) -> Any:
    first = parts[0]
    if not isinstance(value, torch.Tensor) or value.shape != (first.stop - first.start,):
        return value
    strides = dense_strides(parameter)
    whole = torch.empty_strided(parameter.shape, strides, dtype=value.dtype, device=parameter.device)
    row = whole.as_strided((whole.numel(),), (1,))
    for part in parts:
        row[part.start : part.stop].copy_(part.state[key])
    return whole
