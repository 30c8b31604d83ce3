"""A world of workers and one coordinator, whose messages travel as slowly and as unfairly as a test likes."""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.agreement import disagreement, explain_rejections, sizes
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Refuse, Rejection, Run, Unknown, decode, encode
from collectives.controller.process_sets import ProcessSets
from collectives.controller.worker import Worker

CYCLE = 5.0
ALL_REFUSED = "every rank has refused the call"


@dataclass(frozen=True)
class Wrong:
    """A call that one rank refuses, because of its arguments there."""

    request: Request
    reason: str

    @property
    def key(self):
        """As that of the request."""
        return self.request.key


@dataclass
class World:
    """Ranks 0..size-1; each link to and from the coordinator delivers in order.

    Rank 0 is linked like the others, which allows more orders than the engine does. ``log[rank]`` is what ran or was
    refused there, in order, and ``batches[rank]`` the batches; ``traffic`` is every message that was sent.
    """

    size: int
    sets: tuple[tuple[int, ...], ...] = ()
    threshold: int = 1 << 20
    capacity: int = 16
    patient: bool = False
    now: float = 0.0
    log: dict[int, list[tuple]] = field(default_factory=lambda: defaultdict(list))
    traffic: list[tuple[int, object]] = field(default_factory=list)

    def __post_init__(self):
        self.process_sets = ProcessSets(self.size, self.sets)
        sets = ProcessSets(self.size, self.sets)
        parameters = Parameters(self.threshold, CYCLE, self.patient, cache_capacity=self.capacity)
        self.coordinator = Coordinator(sets, parameters)
        self.batches = [[] for _ in range(self.size)]
        self.workers = [Worker(parameters) for _ in range(self.size)]
        self.up = [deque() for _ in range(self.size)]
        self.down = [deque() for _ in range(self.size)]
        self.in_flight = [set() for _ in range(self.size)]

    # Single steps. Each returns whether there was something to do.

    def flush(self, rank):
        """Worker ``rank`` says what is new."""
        message = self.workers[rank].outgoing()
        if message is not None:
            self._send(self.up[rank], rank, message)
        return message is not None

    def rise(self, rank):
        """The coordinator hears the next message of ``rank``."""
        if self.up[rank]:
            self.coordinator.receive(rank, decode(self.up[rank].popleft()), self.now)
            return True
        return False

    def decide(self):
        """The coordinator says what follows from what it heard."""
        outgoing = self.coordinator.decide(self.now)
        for each in outgoing:
            for rank in each.ranks:
                self._send(self.down[rank], rank, each.message)
        return bool(outgoing)

    def fall(self, rank):
        """Worker ``rank`` hears the next message of the coordinator."""
        if not self.down[rank]:
            return False
        message = decode(self.down[rank].popleft())
        worker = self.workers[rank]
        if isinstance(message, Run):
            for batch in worker.run(message):
                self.log[rank].append(("run", *batch.responses))
                self.batches[rank].append(batch)
                self.in_flight[rank] -= {response.request.key for response in batch.responses}
        elif isinstance(message, Refuse):
            refusal = worker.refuse(message)
            self.log[rank].append(("refuse", refusal.key, str(refusal.error)))
            self.in_flight[rank].discard(refusal.key)  # gone already, when its process set is
        elif isinstance(message, Unknown):
            worker.resend(message)
        else:
            self.log[rank].append((type(message).__name__,))
        return True

    def _send(self, link, rank, message):
        self.traffic.append((rank, message))
        link.append(encode(message))

    # Combinations.

    def submit(self, request, *ranks, urgent=False):
        """``request`` on the given ranks, or on all members of its set, one after the other."""
        for rank in ranks or self.process_sets.ranks(request.process_set):
            assert request.key not in self.in_flight[rank], "the engine never does that"
            self.in_flight[rank].add(request.key)
            if isinstance(request, Wrong):
                self.workers[rank].reject(request.request, request.reason)
            else:
                self.workers[rank].submit(request, urgent)

    def urge_any(self, rank, chance):
        """Somebody on ``rank`` begins to wait for something that is in flight."""
        if self.in_flight[rank]:
            self.workers[rank].urge(chance.choice(sorted(self.in_flight[rank])))

    def settle(self):
        """Deliver everything, in rank order, without letting time pass."""
        ranks = range(self.size)
        moved = True
        while moved:
            moved = any([step(rank) for step in (self.flush, self.rise) for rank in ranks])
            moved = self.decide() or moved
            moved = any([self.fall(rank) for rank in ranks]) or moved

    def wait(self):
        """Let the longest time pass that the coordinator may hold a tensor."""
        self.now += CYCLE
        self.settle()

    def ran(self, rank):
        """The names of each batch that ran on ``rank``."""
        return [[each.request.name for each in entry[1:]] for entry in self.log[rank] if entry[0] == "run"]

    def refused(self, rank):
        """The texts of what was refused on ``rank``."""
        return [entry[2] for entry in self.log[rank] if entry[0] == "refuse"]

    def sent(self, kind=Ready):
        """The messages of ``kind`` since the last call of this function."""
        found = [message for _, message in self.traffic if isinstance(message, kind)]
        self.traffic.clear()
        return found


@dataclass
class Script:
    """``calls[i]`` is one collective: what each member submits, or refuses. Calls of one key follow each other."""

    calls: list[dict[int, Request | Wrong]]

    def play(self, world: World, chance: random.Random):
        """Submit everything in random orders, deliver in random orders, until nothing moves."""
        waiting = {rank: self._shuffled(rank, chance) for rank in range(world.size)}
        moves = [(move, rank) for move in (world.flush, world.rise, world.fall) for rank in range(world.size)]
        while any(waiting.values()):
            rank = chance.randrange(world.size)
            if chance.random() < 0.3:
                self._submit_one(world, rank, waiting[rank], chance)
            elif chance.random() < 0.2:
                world.decide()
                world.now += chance.choice((0.0, 1.0, CYCLE))
            elif chance.random() < 0.1:
                world.urge_any(rank, chance)
            else:
                move, mover = chance.choice(moves)
                move(mover)
        world.settle()
        world.wait()

    def _shuffled(self, rank, chance):
        """Of each key the calls stay in order; the keys mix."""
        by_key = defaultdict(deque)
        for call in self.calls:
            if rank in call:
                by_key[call[rank].key].append(call[rank])
        order = [key for key, requests in by_key.items() for _ in requests]
        chance.shuffle(order)
        return [by_key[key].popleft() for key in order]

    def _submit_one(self, world, rank, waiting, chance):
        """The next call whose name is not in flight, as the engine demands."""
        free = [request for request in waiting if request.key not in world.in_flight[rank]]
        if free:
            waiting.remove(free[0])
            world.submit(free[0], rank, urgent=chance.random() < 0.3)

    def expected(self, rank):
        """For each key: what must come of its calls on ``rank``, in order."""
        outcomes = defaultdict(list)
        for call in self.calls:
            if rank in call:
                outcomes[call[rank].key].append(_result(call))
        return dict(outcomes)


def _result(call):
    members = sorted(call)
    wrong = {rank: each for rank, each in call.items() if isinstance(each, Wrong)}
    if wrong:
        rejections = {
            rank: Rejection(each.request.process_set, each.request.name, each.request.group, each.reason)
            for rank, each in wrong.items()
        }
        return ALL_REFUSED if len(wrong) == len(call) else explain_rejections(rejections).text
    why = disagreement(call, members)
    return (call[members[0]], sizes(call, members)) if why is None else why.text


def outcomes(world, rank):
    """For each key: what came of its calls on ``rank``, in order."""
    found = defaultdict(list)
    for entry in world.log[rank]:
        if entry[0] == "run":
            for response in entry[1:]:
                found[response.request.key].append((response.request, response.sizes))
        else:
            found[entry[1]].append(entry[2])
    return dict(found)


def runs_of_set(world, rank, process_sets):
    """The batches of the given sets on ``rank``, in order, by names."""
    return [
        tuple(response.request.key for response in entry[1:])
        for entry in world.log[rank]
        if entry[0] == "run" and entry[1].request.process_set in process_sets
    ]


def tensor(name="a", shape=(4,), **fields):
    return Request(name, fields.pop("operation", Operation.ALLREDUCE), DType.FLOAT32, shape, **fields)


def gather(name, rows, **fields):
    return tensor(name, (rows, 3), operation=Operation.ALLGATHER, **fields)


# The response cache.


def leftovers(machine):
    """The containers of a machine."""
    return {name: kept for name, kept in vars(machine).items() if isinstance(kept, dict | list | set)}


# Everything at once.


@st.composite
def scripts(draw):
    """Some ranks, some process sets, and calls that repeat a few names with mostly the same parameters."""
    size = draw(st.integers(2, 4))
    subsets = st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1).map(lambda ranks: tuple(sorted(ranks)))
    sets = tuple(draw(st.lists(subsets, unique=True, max_size=3)))
    members = [tuple(range(size)), *sets]
    calls = [draw(one_call(members)) for _ in range(draw(st.integers(1, 14)))]
    return size, sets, Script(calls)


@st.composite
def one_call(draw, members):
    process_set = draw(st.integers(0, len(members) - 1))
    name = draw(st.sampled_from("ab"))
    operation = draw(st.sampled_from([Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER]))
    dtype = draw(st.sampled_from([DType.FLOAT32, DType.FLOAT32, DType.INT8]))
    request = Request(name, operation, dtype, (draw(st.sampled_from([3, 3, 4])), 2), process_set=process_set)
    call = {rank: request for rank in members[process_set]}
    if draw(st.integers(0, 3)) == 0:  # one rank says something else: a mismatch, or its own number of rows
        rank = draw(st.sampled_from(sorted(call)))
        call[rank] = replace(request, shape=(draw(st.sampled_from([5, 6])), 2))
    return call


def held(**fields):
    """A world where "a" is ready, and held because "b" is half-submitted."""
    world = World(2, **fields)
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"))
    world.settle()
    assert not world.log
    assert world.coordinator.deadline == CYCLE
    return world
