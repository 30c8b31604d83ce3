"""All ranks agree in any order: random scripts, threads, process sets, groups and joins.

A track is what one thread of each rank does, one step after the other; the tracks of a rank mix as chance has it.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, Operation, Request
from tests.collectives.controller.negotiation_simulation import (
    CYCLE,
    Script,
    World,
    leftovers,
    outcomes,
    runs_of_set,
    scripts,
    tensor,
)

# Everything at once.


@settings(max_examples=250)
@given(scripts(), st.integers(0, 3), st.sampled_from([0, 30, 1 << 20]), st.booleans(), st.integers(0, 1 << 32))
def test_whatever_the_order_all_ranks_agree_and_nothing_is_lost(scripted, capacity, threshold, patient, seed):
    size, sets, script = scripted
    world = World(size, sets, threshold, capacity, patient)
    script.play(world, random.Random(seed))
    for rank in range(size):
        assert outcomes(world, rank) == script.expected(rank)
    for one in range(size):
        for other in range(one):
            shared = {id for id in world.process_sets.ids() if {one, other} <= set(world.process_sets.ranks(id))}
            assert runs_of_set(world, one, shared) == runs_of_set(world, other, shared)
    for worker in world.workers:
        kept = leftovers(worker)
        assert not {
            name: kept[name]
            for name in kept
            if kept[name] and name not in ("_ids", "_responses", "_ids_of_sets", "introduced")
        }


def test_a_long_job_with_a_small_cache():
    """More rounds than hypothesis has patience for."""
    for seed in range(20):
        chance = random.Random(seed)
        calls = []
        for _ in range(60):
            request = tensor(chance.choice("abcd"), (chance.choice((3, 3, 3, 4)),), process_set=chance.randrange(2))
            call = dict.fromkeys(((0, 1, 2), (0, 2))[request.process_set], request)
            if chance.random() < 0.1:
                call[2] = replace(request, shape=(1,))
            calls.append(call)
        world, script = World(3, ((0, 2),), capacity=2), Script(calls)
        script.play(world, chance)
        for rank in range(3):
            assert outcomes(world, rank) == script.expected(rank), f"seed {seed}"


@dataclass
class Epoch:
    """Calls of which each member takes a share; then all join. ``calls`` are (name, kind, participants, group)."""

    calls: list[tuple[str, Operation, frozenset, str]]

    def requests(self, rank, process_set, chance):
        """The tensors that ``rank`` submits, in an order of its own; a group goes together."""
        bundles = defaultdict(list)
        for number, (name, operation, ranks, group) in enumerate(self.calls):
            if rank in ranks:
                size = sum(each[3] == group for each in self.calls) if group else 0
                request = Request(
                    name, operation, DType.FLOAT32, (rank + 1, 2) if operation is Operation.ALLGATHER else (3, 2),
                    process_set=process_set, group=group, group_size=size,
                )  # fmt: skip
                bundles[group or number].append(request)
        order = list(bundles.values())
        chance.shuffle(order)
        return order


@dataclass
class Life:
    """The calls on one process set, over the epochs; ``dynamic`` sets are added before, and removed after."""

    members: tuple[int, ...]
    epochs: list[Epoch]
    dynamic: bool
    ids: set[int] = field(default_factory=set)

    def track(self, player, rank, static_id):
        """A thread of ``rank``: yields until it may go on."""
        id = static_id
        if self.dynamic:
            request = Request("add", Operation.ADD_PROCESS_SET, splits=self.members)
            yield from player.blocking(rank, request)
            id = player.answers[rank].sizes[0]
            self.ids.add(id)
        if rank in self.members:
            for number, epoch in enumerate(self.epochs):
                yield from self._epoch(player, rank, epoch, Request(f"join.{number}", Operation.JOIN, process_set=id))
        if self.dynamic:
            request = Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=id, splits=self.members)
            yield from player.blocking(rank, request)

    def _epoch(self, player, rank, epoch, join):
        for bundle in epoch.requests(rank, join.process_set, player.chance):
            while any(request.key in player.world.in_flight[rank] for request in bundle):
                yield
            player.submit(rank, bundle)
            yield
        yield from player.blocking(rank, join)


class Player:
    """Lets the tracks of all ranks go on, and the messages travel, in random order."""

    def __init__(self, world, chance):
        self.world, self.chance = world, chance
        self.answers = {}

    def submit(self, rank, requests):
        for request in requests:
            self.world.submit(request, rank, urgent=self.chance.random() < 0.3)

    def blocking(self, rank, request):
        """Submit, and go on when it has run, and everything else of that set."""
        self.world.submit(request, rank, urgent=True)
        while any(key[0] == request.process_set and key[1] == request.name for key in self.world.in_flight[rank]):
            yield
        self.answers[rank] = next(
            response
            for entry in reversed(self.world.log[rank])
            for response in entry[1:]
            if response.request.key == request.key
        )

    def play(self, tracks):
        """``tracks`` are (rank, generator)."""
        world, chance, waiting = self.world, self.chance, list(tracks)
        moves = [(move, rank) for move in (world.flush, world.rise, world.fall) for rank in range(world.size)]
        for _ in range(30_000):
            if not waiting:
                break
            if chance.random() < 0.3:
                track = chance.choice(waiting)
                if next(track[1], track) is track:
                    waiting.remove(track)
            elif chance.random() < 0.2:
                world.decide()
                world.now += chance.choice((0.0, 1.0, CYCLE))
            else:
                move, rank = chance.choice(moves)
                move(rank)
        assert not waiting, f"stuck: {world.coordinator.waiting()}"
        world.settle()
        world.wait()


@st.composite
def lives(draw):
    size = draw(st.integers(2, 4))
    some = st.sets(st.integers(0, size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    proper = some.filter(lambda ranks: len(ranks) < size)
    static = draw(st.lists(proper, unique=True, max_size=2))
    dynamic = draw(st.lists(proper.filter(lambda ranks: ranks not in static), max_size=3))
    everybody = tuple(range(size))
    return size, [
        *(Life(members, draw(epochs(members)), False) for members in [everybody, *static]),
        *(Life(members, draw(epochs(members)), True) for members in dynamic),
    ]


@st.composite
def epochs(draw, members):
    share = st.sets(st.sampled_from(members), min_size=1).map(frozenset)
    result = []
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
            kind = draw(st.sampled_from([Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER]))
            calls.append((name, kind, draw(share), ""))
        names = draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=3))
        ranks = draw(share)
        calls += [(name, Operation.ALLREDUCE, ranks, "group") for name in names]
        result.append(Epoch(calls))
    return result


@settings(max_examples=150)
@given(lives(), st.integers(0, 4), st.sampled_from([0, 60, 1 << 20]), st.booleans(), st.integers(0, 1 << 32))
def test_whatever_happens_all_ranks_agree_and_nothing_is_lost(lived, capacity, threshold, patient, seed):
    size, all_lives = lived
    static = [life for life in all_lives if not life.dynamic]
    world = World(size, tuple(life.members for life in static[1:]), threshold, capacity, patient)
    player = Player(world, random.Random(seed))
    tracks = [
        (rank, life.track(player, rank, id)) for id, life in enumerate(static) for rank in range(size)
    ]  # fmt: skip
    dynamic = [life for life in all_lives if life.dynamic]
    tracks += [(rank, one_after_the_other(dynamic, player, rank)) for rank in range(size)]
    player.play(tracks)

    for id, life in enumerate(static):
        check_life(world, id, life)
    for life in dynamic:
        assert len(life.ids) == 1, "the ranks got different ids"
    for one in range(size):
        for other in range(one):
            shared = {0, *(id for id, life in enumerate(static) if {one, other} <= set(life.members))}
            assert runs_of_set(world, one, shared) == runs_of_set(world, other, shared)
    expected = Counter(
        name for life in dynamic for epoch in life.epochs for name, _, _, _ in epoch.calls for _ in life.members
    )
    ran = Counter(
        response.request.name
        for rank in range(size)
        for entry in world.log[rank]
        for response in entry[1:]
        if response.request.process_set >= len(static) and response.request.operation is not Operation.JOIN
    )
    assert ran == expected
    assert not any(world.refused(rank) for rank in range(size))
    assert not world.coordinator.waiting()


def one_after_the_other(lives_of_sets, player, rank):
    for life in lives_of_sets:
        yield from life.track(player, rank, None)


def check_life(world, id, life):
    """Each epoch's calls ran once, on all members, with the rows of those who took part, before the join's end."""
    for rank in life.members:
        ran = [
            response
            for entry in world.log[rank]
            for response in entry[1:]
            if response.request.process_set == id
            and response.request.operation not in (Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET)
        ]
        for number, epoch in enumerate(life.epochs):
            count = len(epoch.calls)
            calls, join, ran = ran[:count], ran[count], ran[count + 1 :]
            assert sorted(call.request.name for call in calls) == sorted(name for name, _, _, _ in epoch.calls)
            assert join.request.name == f"join.{number}"
            assert join.sizes[0] in life.members
            rows = {name: ranks for name, kind, ranks, _ in epoch.calls if kind is Operation.ALLGATHER}
            for call in calls:
                if call.request.name in rows:
                    ranks = rows[call.request.name]
                    assert call.sizes == tuple(each + 1 if each in ranks else 0 for each in life.members)
        assert not ran
