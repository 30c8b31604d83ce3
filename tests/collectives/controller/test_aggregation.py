"""How the ranks of a host speak with one voice."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.aggregation import MOST_APART, Aggregator
from collectives.controller.coordinator import Coordinator
from collectives.controller.errors import ErrorData
from collectives.controller.messages import (
    ABANDONED,
    Abort,
    Leave,
    Left,
    Ready,
    Refuse,
    Rejection,
    Response,
    Run,
    Together,
    Unknown,
)
from collectives.controller.process_sets import ProcessSets
from collectives.controller.releases import Outgoing
from tests.collectives.controller.hosted_simulation import HostedWorld, expanded
from tests.collectives.controller.negotiation_simulation import CYCLE, outcomes, scripts

JOIN = Request("join", Operation.JOIN)
HERE = (2, 3, 5)


def tensor(name="a", process_set=0, **fields):
    return Request(name, Operation.ALLREDUCE, process_set=process_set, **fields)


def run(*responses, forget=()):
    """They run together, for the first time."""
    return Run((tuple(each.id for each in responses),), responses, forget)


@pytest.fixture
def host():
    """The aggregator of ranks 2, 3 and 5 out of six; ids 1 and 2 are on all ranks, 3 on ranks 1 and 3, 4 on 2 and 5."""
    aggregator = Aggregator(HERE, ProcessSets(6, [(1, 3), (2, 5)]))
    aggregator.down(run(Response(1, tensor("a")), Response(2, tensor("b"))))
    aggregator.down(run(Response(3, tensor("c", 1))))
    aggregator.down(run(Response(4, tensor("d", 2))))
    return aggregator


def say(aggregator, *ranks, ids=(1,), urgent=(), requests=()):
    """The messages to the coordinator while ``ranks`` send the same, one after the other."""
    message = Ready(requests, ids, urgent_ids=urgent)
    return [each for rank in ranks for each in aggregator.up(rank, message)]


# Together.


def test_an_id_goes_up_once_when_all_of_the_host_have_said_it(host):
    for _ in range(2):
        assert say(host, 5, 2) == []
        assert host.holds
        assert say(host, 3) == [(None, Together(HERE, (1,)))]
        assert not host.holds
        host.down(Run(((1,),)))


def test_ids_that_come_together_go_together_for_each_group_of_ranks(host):
    assert say(host, 2, ids=(1, 2, 4)) == []
    assert say(host, 5, ids=(4, 2, 1)) == [(None, Together((2, 5), (4,)))]
    assert say(host, 3, ids=(2, 1)) == [(None, Together(HERE, (2, 1)))]


def test_a_rank_that_is_alone_here_in_a_set_speaks_for_itself(host):
    assert say(host, 3, ids=(3,), urgent=(3,)) == [(3, Ready(ids=(3,), urgent_ids=(3,)))]


def test_an_urgency_before_the_last_word_goes_with_it(host):
    assert say(host, 2, urgent=(1,)) == []
    assert say(host, 3, 5, urgent=(1,)) == [(None, Together(HERE, (1,), (1,)))]


def test_an_urgency_after_the_last_word_goes_at_once_and_once(host):
    say(host, *HERE)
    assert say(host, *HERE, ids=(), urgent=(1,)) == [(None, Together(HERE, (), (1,)))]


def test_an_urgency_is_over_when_the_tensor_has_run(host):
    say(host, *HERE, urgent=(1,))
    host.down(Run(((1,),)))
    assert say(host, 3, ids=(), urgent=(1,)) == []
    assert say(host, *HERE) == [(None, Together(HERE, (1,)))]


# New tensors.

NEW = tensor("new")
OTHER = tensor("new", shape=(2,))


def say_new(aggregator, *ranks, request=NEW, **fields):
    """The messages to the coordinator while ``ranks`` send the same new tensor, one after the other."""
    return [each for rank in ranks for each in aggregator.up(rank, Ready((request,), **fields))]


def test_a_new_tensor_goes_up_once_when_all_of_the_host_have_sent_the_same(host):
    assert say_new(host, 5, 2) == []
    assert host.holds
    assert say_new(host, 3, ids=(9,)) == [(None, Together(HERE, requests=(NEW,))), (3, Ready(ids=(9,)))]
    assert not host.holds
    host.down(run(Response(7, NEW)))
    assert say(host, *HERE, ids=(7,)) == [(None, Together(HERE, (7,)))]


def test_one_message_has_the_ids_and_the_new_tensors_of_a_host(host):
    assert say_new(host, 2, 5, ids=(1,)) == []
    expected = Together(HERE, (1,), (1,), (NEW,), (NEW.key,))
    assert say_new(host, 3, ids=(1,), urgent_ids=(1,), urgent=(NEW.key,)) == [(None, expected)]


def test_a_new_tensor_is_urgent_once(host):
    assert say_new(host, 2, urgent=(NEW.key,)) == []
    assert say_new(host, 3, 5) == [(None, Together(HERE, requests=(NEW,), urgent=(NEW.key,)))]
    assert host.up(5, Ready(urgent=(NEW.key,))) == []


def test_an_urgency_after_the_new_tensor_goes_at_once_and_once(host):
    say_new(host, *HERE)
    assert host.up(3, Ready(urgent=(NEW.key,))) == [(None, Together(HERE, urgent=(NEW.key,)))]
    assert host.up(2, Ready(urgent=(NEW.key,))) == []


def test_new_tensors_that_differ_go_up_by_rank(host):
    assert say_new(host, 2, urgent=(NEW.key,)) == []
    words = [(2, Ready((NEW,), urgent=(NEW.key,))), (3, Ready((OTHER,)))]
    assert say_new(host, 3, request=OTHER) == words
    assert say_new(host, 5, urgent=(NEW.key,)) == [(5, Ready((NEW,), urgent=(NEW.key,)))]
    host.down(Refuse(0, "new", "they differ"))
    assert say_new(host, *HERE) == [(rank, Ready((NEW,))) for rank in HERE], "rank 5 may have sent it before"
    host.down(run(Response(7, NEW), forget=(7,)))
    assert say_new(host, *HERE) == [(None, Together(HERE, requests=(NEW,)))]


def test_a_new_tensor_that_was_held_for_long_goes_up_by_rank_until_it_has_run(host):
    say_new(host, 2, 5, urgent=(NEW.key,))
    assert host.flush() == [(2, Ready((NEW,), urgent=(NEW.key,))), (5, Ready((NEW,)))]
    assert host.flush() == []
    assert say_new(host, 3) == [(3, Ready((NEW,)))]
    host.down(run(Response(7, NEW), forget=(7,)))
    host.down(Run((), forget=(7,)))
    assert say_new(host, *HERE) == [(None, Together(HERE, requests=(NEW,)))]


@pytest.mark.parametrize(
    "word",
    [Ready(rejected=(Rejection(0, "new", "", "bad"),)), Ready((JOIN,)), Ready((tensor("x"),), answered=(2,))],
    ids=["rejected", "join", "answered"],
)
def test_a_new_tensor_that_cannot_be_combined_any_more_is_not_held(host, word):
    say_new(host, 2, 5)
    assert host.up(3, word) == [(2, Ready((NEW,))), (5, Ready((NEW,))), (3, word)]
    assert not host.holds


def test_an_abandoned_new_tensor_goes_up_by_rank_until_it_has_run(host):
    say_new(host, *HERE)
    gone = Ready(abandoned=(NEW.key,))
    assert host.up(3, gone) == [(3, gone)]
    assert host.down(Refuse(0, "new", ABANDONED)) == []
    assert say_new(host, 3) == [(3, Ready((NEW,)))]
    host.down(run(Response(7, NEW)))
    assert say(host, *HERE, ids=(7,)) == [(None, Together(HERE, (7,)))]


def test_a_tensor_whose_id_went_up_alone_and_is_dropped_is_not_held(host):
    """Rank 2 has sent its id, and sends it anew when the coordinator asks."""
    say(host, 2)
    assert host.flush() == [(2, Ready(ids=(1,)))]
    host.down(run(Response(7, NEW), forget=(1,)))
    again = Ready((tensor("a"),), urgent=((0, "a"),))
    assert host.up(3, again) == [(3, again)]
    assert not host.holds


@pytest.mark.parametrize("grouped_first", [False, True])
def test_a_tensor_in_a_group_here_and_in_none_there_is_not_held(host, grouped_first):
    grouped = tensor("new", group="g", group_size=2)
    requests = [grouped, NEW] if grouped_first else [NEW, grouped]
    words = [
        each for rank, request in zip((2, 3), requests, strict=True) for each in say_new(host, rank, request=request)
    ]
    assert words == [(2, Ready((requests[0],))), (3, Ready((requests[1],)))]
    assert not host.holds


REMOVE = Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=2)
REMOVED = run(Response(21, REMOVE), forget=(21,))
ADDED = run(Response(22, Request("add", Operation.ADD_PROCESS_SET, splits=(2, 5)), (2,)), forget=(22,))


def test_what_is_held_goes_up_before_the_removal_of_its_set_and_at_once_after_it(host):
    new = tensor("new", 2)
    say_new(host, 2, request=new)
    assert host.up(2, Ready((REMOVE,))) == [(2, Ready((new, REMOVE)))]
    assert say_new(host, 5, request=new) == [(5, Ready((new,)))]
    assert host.down(REMOVED) == []
    assert say_new(host, 2, request=new) == [(2, Ready((new,)))]
    host.down(Refuse(2, "new", "removed"))
    host.down(ADDED)
    assert say_new(host, 2, 5, request=new) == [(None, Together((2, 5), requests=(new,)))]


def test_a_removal_that_is_refused_leaves_the_set_as_it_was(host):
    host.up(2, Ready((REMOVE,)))
    host.down(Refuse(0, "remove", "they differ"))
    assert say_new(host, 2, 5, request=tensor("new", 2)) == [(None, Together((2, 5), requests=(tensor("new", 2),)))]


def test_tensors_that_are_abandoned_for_good_are_forgotten_in_the_end(host):
    for number in range(2 * MOST_APART):
        host.up(2, Ready((tensor(str(number)),)))
        host.up(2, Ready(abandoned=((0, str(number)),)))
        host.down(Refuse(0, str(number), ABANDONED))
    assert len(host._apart) == MOST_APART
    assert not host.holds


def test_a_held_new_tensor_of_a_set_that_is_removed_goes_up(host):
    new = tensor("new", 2)
    say_new(host, 5, request=new)
    assert host.down(REMOVED) == [(5, Ready((new,)))]
    assert not host.holds


# Apart.


@pytest.mark.parametrize(
    "message",
    [
        Ready((tensor("new", group="g", group_size=2),), urgent=((0, "new"),)),
        Ready((Request("add", Operation.ADD_PROCESS_SET, splits=(2, 3)),)),
        Ready(urgent=((0, "new"),)),
        Leave(),
        Left(),
        Abort(ErrorData("kind", "text")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_no_cached_id_passes_at_once(host, message):
    assert host.up(3, message) == [(3, message)]


def test_an_id_that_is_not_known_passes_by_rank(host):
    assert say(host, 2, 3, ids=(9,), urgent=(9,)) == [(rank, Ready(ids=(9,), urgent_ids=(9,))) for rank in (2, 3)]


def test_of_a_mixed_message_the_known_ids_stay(host):
    once = Request("add", Operation.ADD_PROCESS_SET, splits=(2, 3))
    assert say(host, 2, ids=(9, 1), requests=(once, tensor("new"))) == [(2, Ready((once,), (9,)))]


def test_what_was_held_for_long_goes_up_by_rank_until_it_has_run(host):
    say(host, 2, 5, ids=(1, 2), urgent=(2,))
    say(host, 3, ids=(2,))
    assert host.flush() == [(2, Ready(ids=(1,))), (5, Ready(ids=(1,)))]
    assert host.flush() == []
    assert say(host, 3, urgent=(1,)) == [(3, Ready(ids=(1,), urgent_ids=(1,)))]
    host.down(Run(((1, 2),)))
    assert say(host, *HERE) == [(None, Together(HERE, (1,)))]


def test_a_flush_does_not_lose_the_urgency(host):
    say(host, 2, 5, urgent=(1,))
    assert host.flush() == [(2, Ready(ids=(1,), urgent_ids=(1,))), (5, Ready(ids=(1,)))]


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_says_it_in_full_keeps_nobody_waiting(host, before):
    changed = tensor("a", shape=(9,))
    words = [(2, Ready(ids=(1,))), (3, Ready((changed,)))]
    if before:
        assert say(host, 2) + say(host, 3, ids=(), requests=(changed,)) == words
    else:
        assert say(host, 3, ids=(), requests=(changed,)) + say(host, 2) == words[::-1]
    assert say(host, 5) == [(5, Ready(ids=(1,)))]
    host.down(run(Response(7, tensor("a")), forget=(1,)))
    assert say(host, *HERE, ids=(7,)) == [(None, Together(HERE, (7,)))]


def test_a_rank_that_says_in_full_what_is_dropped_then_keeps_nobody_waiting(host):
    changed = tensor("a", shape=(9,))
    assert say_new(host, 3, request=changed) == [(3, Ready((changed,)))]
    assert host.down(Run((), forget=(1,))) == []
    assert say_new(host, 2, request=changed) == [(2, Ready((changed,)))]
    assert not host.holds


@pytest.mark.parametrize(
    "message", [Run((), forget=(1,)), Unknown((1,)), Refuse(0, "a", "text")], ids=lambda message: type(message).__name__
)
def test_an_id_that_was_dropped_is_not_held(host, message):
    say(host, 2, 5, ids=(1, 2))
    assert host.down(message) == [(2, Ready(ids=(1,))), (5, Ready(ids=(1,)))]
    assert say(host, 3) == [(3, Ready(ids=(1,)))]
    assert say(host, 3, ids=(2,)) == [(None, Together(HERE, (2,)))]


def test_an_id_may_be_new_and_dropped_in_one_run(host):
    assert host.down(run(Response(7, tensor("once")), forget=(7,))) == []
    assert say(host, 2, ids=(7,)) == [(2, Ready(ids=(7,)))]


def test_a_refusal_of_something_else_changes_nothing(host):
    say(host, 2, 3)
    assert host.down(Refuse(1, "a", "text")) == host.down(Left()) == []
    assert say(host, 5) == [(None, Together(HERE, (1,)))]


# Joins and process sets.


def test_while_a_rank_has_joined_its_set_speaks_by_rank(host):
    say(host, 2, ids=(1, 4))
    joined = host.up(3, Ready((JOIN,), (2,)))
    assert joined == [(2, Ready(ids=(1,))), (3, Ready((JOIN,), (2,)))]
    assert say(host, 5, ids=(1, 2, 4)) == [(None, Together((2, 5), (4,))), (5, Ready(ids=(1, 2)))]
    host.down(Run(((1, 2, 4),)))
    assert say(host, 2, 5) == [(2, Ready(ids=(1,))), (5, Ready(ids=(1,)))]
    host.down(Run(((1,),)))
    host.down(run(Response(8, JOIN, (5,)), forget=(8,)))
    assert say(host, *HERE) == [(None, Together(HERE, (1,)))]


def test_what_was_said_by_rank_before_the_end_of_a_join_stays_so(host):
    host.up(3, Ready((JOIN,)))
    host.down(run(Response(7, tensor("new"))))
    assert say(host, 2, ids=(7,)) == [(2, Ready(ids=(7,)))]
    host.down(run(Response(8, JOIN, (5,)), forget=(8,)))
    assert say(host, 3, 5, ids=(7,)) == [(3, Ready(ids=(7,))), (5, Ready(ids=(7,)))]


def test_process_sets_come_and_go(host):
    remove = Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=3)
    for ranks in ((0, 3, 5), (2, 3)):
        here = tuple(rank for rank in ranks if rank in HERE)
        host.down(run(Response(20, Request("add", Operation.ADD_PROCESS_SET, splits=ranks), (3,)), forget=(20,)))
        host.down(run(Response(30 + len(ranks), tensor("e", 3))))
        id = 30 + len(ranks)
        assert say(host, *here, ids=(id,)) == [(None, Together(here, (id,)))]
        host.down(Run(((id,),)))
        say(host, here[0], ids=(id,))
        assert host.down(run(Response(21, remove), forget=(21,))) == [(here[0], Ready(ids=(id,)))]
        assert say(host, *here, ids=(id,)) == [(rank, Ready(ids=(id,))) for rank in here]


# Whatever the order.


@dataclass
class Ranks:
    """Ranks of one host that say random things; ``said`` and ``heard`` count (rank, id), ``urged`` and ``hurried`` ids.

    Of each id a flight begins when nobody has said it since it ran; in a flight each member says it once.
    """

    aggregator: Aggregator
    members: dict[int, tuple[int, ...]]
    chance: random.Random
    said: Counter = field(default_factory=Counter)
    heard: Counter = field(default_factory=Counter)
    urged: set = field(default_factory=set)
    hurried: set = field(default_factory=set)
    flights: dict[int, set[int]] = field(default_factory=dict)

    def speak(self):
        """One rank says some ids that it may say, and that it waits for some of those that it has said."""
        rank = self.chance.choice(sorted({rank for ranks in self.members.values() for rank in ranks}))
        mine = [id for id, ranks in self.members.items() if rank in ranks]
        ids = [id for id in mine if rank not in self.flights.get(id, ()) and self.chance.random() < 0.6]
        self.chance.shuffle(ids)
        for id in ids:
            self.flights.setdefault(id, set()).add(rank)
            self.said[rank, id] += 1
        waits = [id for id in mine if rank in self.flights.get(id, ()) and self.chance.random() < 0.2]
        self.urged.update(waits)
        if ids or waits:
            self.listen(self.aggregator.up(rank, Ready(ids=tuple(ids), urgent_ids=tuple(waits))))

    def listen(self, messages):
        """As the coordinator does."""
        for rank, message in messages:
            words = expanded(rank, message)
            self.heard.update((each, id) for each, word in words for id in word.ids)
            assert all(self.heard[each, id] for each, word in words for id in word.urgent_ids)
            self.hurried.update(message.urgent_ids)

    def run(self):
        """The tensors that all ranks have sent run."""
        done = [id for id, ranks in self.flights.items() if len(ranks) == len(self.members[id])]
        for id in done:
            assert all(self.heard[rank, id] == self.said[rank, id] for rank in self.members[id])
            assert (id in self.hurried) == (id in self.urged)
            del self.flights[id]
        self.hurried.difference_update(done)
        self.urged.difference_update(done)
        if done:
            self.listen(self.aggregator.down(Run((tuple(done),))))

    def disturb(self):
        """Events that separate ids: a second that passes, a drop, a full request, a join and its end."""
        full = tensor(self.chance.choice("abcdef"), self.chance.randrange(2))
        disturbances = (
            self.aggregator.flush,
            lambda: self.aggregator.down(Unknown((self.chance.randrange(1, 7),))),
            lambda: self.aggregator.up(HERE[0], Ready((full,))),
            lambda: self.aggregator.up(HERE[0], Ready((JOIN,))),
            lambda: self.aggregator.down(run(Response(99, JOIN, (0,)), forget=(99,))),
        )
        self.listen(self.chance.choice(disturbances)())


subsets = st.sets(st.integers(0, 6), min_size=1, max_size=6).map(lambda ranks: tuple(sorted(ranks)))


@given(st.lists(subsets, max_size=2, unique=True), st.integers(0, 1 << 32))
def test_nothing_is_lost_or_doubled(sets, seed):
    chance = random.Random(seed)
    process_sets = ProcessSets(7, sets)
    aggregator = Aggregator(HERE, process_sets)
    members = {}
    for id, name in enumerate("abcdef", 1):
        process_set = chance.choice(process_sets.ids())
        here = tuple(rank for rank in process_sets.ranks(process_set) if rank in HERE)
        if here:
            members[id] = here
            aggregator.down(run(Response(id, tensor(name, process_set))))
    world = Ranks(aggregator, members, chance)
    for _ in range(60 if members else 0):
        world.speak()
        if chance.random() < 0.1:
            world.disturb()
        world.run()
    world.listen(aggregator.flush())
    assert world.heard == world.said


@given(st.integers(0, 1 << 32))
def test_in_the_steady_state_a_host_says_each_id_once(seed):
    chance = random.Random(seed)
    world = Ranks(Aggregator(HERE, ProcessSets(6)), dict.fromkeys(range(1, 5), HERE), chance)
    for id in world.members:
        world.aggregator.down(run(Response(id, tensor(str(id)))))
    messages, listen = [], world.listen
    world.listen = lambda found: (messages.extend(found), listen(found))
    for _ in range(40):
        world.speak()
        world.run()
    assert all(isinstance(message, Together) and rank is None for rank, message in messages)
    assert {message.ranks for _, message in messages} <= {HERE}


def test_a_step_is_one_message_of_a_host(host):
    for _ in range(3):
        ready = Ready(ids=(1, 2), urgent_ids=(2,))
        assert [host.up(rank, ready) for rank in HERE] == [[], [], [(None, Together(HERE, (1, 2), (2,)))]]
        host.down(Run(((1, 2),)))


@settings(max_examples=250)
@given(scripts(), st.integers(0, 3), st.sampled_from([0, 30, 1 << 20]), st.booleans(), st.integers(0, 1 << 32))
def test_with_the_real_coordinator_and_workers(scripted, capacity, threshold, patient, seed):
    size, sets, script = scripted
    chance = random.Random(seed)
    ranks = list(range(size))
    chance.shuffle(ranks)
    cut = chance.randrange(size)
    hosts = tuple(tuple(sorted(part)) for part in (ranks[:cut], ranks[cut:]) if len(part) > 1)
    world = HostedWorld(size, sets, threshold, capacity, patient, hosts=hosts)
    script.play(world, chance)
    for rank in range(size):
        assert outcomes(world, rank) == script.expected(rank)


class Twins:
    """A coordinator, and one that takes each message id by id: they say the same, and ranks wait for the same."""

    def __init__(self, make):
        self.one, self.other = make(), make()
        self.other._submissions.add_together = lambda *_: False

    def __getattr__(self, name):
        return getattr(self.one, name)

    def receive(self, rank, message, now):
        """Both hear it."""
        for each in (self.one, self.other):
            each.receive(rank, message, now)

    def decide(self, now):
        """The messages, which are the same for both."""
        found = self.one.decide(now)
        assert self.other.decide(now) == found
        assert self.one.waiting() == self.other.waiting()
        return found


class Hosts:
    """Three hosts of two ranks, which send known ids, mostly all that they can, and sometimes something else."""

    NAMES = "abcd"

    def __init__(self, coordinator, chance):
        self.coordinator, self.chance = coordinator, chance
        self.ids = {}
        self.sent = {rank: set() for rank in range(6)}

    def step(self):
        """A host, or a rank, sends something."""
        first = self.chance.choice((0, 2, 4))
        host = (first, first + 1)
        free = [name for name in self.NAMES if not any(name in self.sent[rank] for rank in host)]
        known = [name for name in free if name in self.ids]
        if self.chance.random() < 0.05:
            self.disturb(self.chance.choice(host))
        elif known and self.chance.random() < 0.8:
            if self.chance.random() < 0.2:
                known = self.chance.sample(known, self.chance.randint(1, len(known)))
            urgent = tuple(self.ids[name] for name in known if self.chance.random() < 0.1)
            self.say(host, known, Together(host, tuple(self.ids[name] for name in known), urgent))
        elif free:
            self.say(host, free, Together(host, requests=tuple(replace(TENSOR, name=name) for name in free)))
        else:
            self.catch_up(self.chance.choice(host))

    def catch_up(self, rank):
        """A rank sends alone what the other rank of its host has sent alone."""
        names = [name for name in self.NAMES if name not in self.sent[rank]]
        ids = tuple(self.ids[name] for name in names if name in self.ids)
        requests = tuple(replace(TENSOR, name=name) for name in names if name not in self.ids)
        self.say((rank,), names, Ready(requests, ids))

    def disturb(self, rank):
        """A rank does something alone."""
        name = self.chance.choice(self.NAMES)
        request, key = replace(TENSOR, name=name, shape=(self.chance.choice((4, 4, 5)),)), (0, name)
        if name in self.sent[rank]:
            self.sent[rank].discard(name)
            self.tell(rank, Ready(abandoned=(key,)))
        elif name in self.ids and self.chance.random() < 0.5:
            self.say((rank,), [name], Ready(ids=(self.ids[name],)))
        else:
            self.say((rank,), [name], Ready((request,)))

    def say(self, ranks, names, message):
        """``ranks`` send these ``names``."""
        for rank in ranks:
            self.sent[rank].update(names)
        self.tell(ranks[0], message)

    def tell(self, rank, message):
        """And what follows."""
        self.coordinator.receive(rank, message, 0.0)
        for outgoing in self.coordinator.decide(0.0):
            told = outgoing.message
            if isinstance(told, Run):
                self.run(told)
                continue
            ids = told.ids if isinstance(told, Unknown) else ()
            gone = {name for name, id in self.ids.items() if id in ids} or {getattr(told, "name", "")}
            for each in outgoing.ranks:
                self.sent[each] -= gone

    def run(self, told):
        """Tensors run on all ranks."""
        self.ids |= {response.request.name: response.id for response in told.responses}
        ran = {name for name, id in self.ids.items() if any(id in batch for batch in told.batches)}
        self.ids = {name: id for name, id in self.ids.items() if id not in told.forget}
        self.sent = {rank: sent - ran for rank, sent in self.sent.items()}


@settings(max_examples=60)
@given(st.sampled_from([2, 3, 16]), st.integers(0, 1 << 32))
def test_ids_that_come_together_count_as_if_they_came_alone(capacity, seed):
    twins = Twins(lambda: Coordinator(ProcessSets(6), Parameters(cache_capacity=capacity)))
    hosts = Hosts(twins, random.Random(seed))
    for _ in range(150):
        hosts.step()


TENSOR = Request("a", Operation.ALLREDUCE, DType.FLOAT32, (4,))


# Hosts.


def known_id(coordinator, ranks, request=TENSOR):
    """Negotiate ``request`` and return the id it got."""
    for rank in ranks:
        coordinator.receive(rank, Ready((request,)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    return outgoing.message.batches[0][0]


def test_a_host_speaks_for_its_ranks():
    coordinator = Coordinator(ProcessSets(4), Parameters())
    id = known_id(coordinator, range(4))
    coordinator.receive(2, Together((2, 3), (id,)), 0.0)
    coordinator.receive(0, Ready(ids=(id,)), 0.0)
    assert coordinator.waiting()[0, "a"].submitted == (0, 2, 3)
    assert not coordinator.decide(0.0)
    coordinator.receive(1, Ready(ids=(id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1, 2, 3), Run(((id,),), first=1))]


def test_what_happens_to_one_of_several_ids_happens_to_it_alone():
    """Others of the same message go on together."""
    coordinator = Coordinator(ProcessSets(6), Parameters(fusion_threshold=0))
    ids = tuple(known_id(coordinator, range(6), replace(TENSOR, name=name)) for name in "abc")
    coordinator.receive(0, Together((0, 1), ids), 0.0)
    coordinator.receive(2, Together((2, 3), ids), 0.0)
    coordinator.receive(4, Ready(ids=ids[:1]), 0.0)
    coordinator.receive(5, Ready(abandoned=((0, "b"),)), 0.0)
    coordinator.receive(1, Ready(abandoned=((0, "b"),)), 0.0)
    assert {key[1]: waiting.submitted for key, waiting in coordinator.waiting().items()} == {
        "a": (0, 1, 2, 3, 4),
        "b": (0, 2, 3),
        "c": (0, 1, 2, 3),
    }
    coordinator.receive(4, Together((4, 5), ids[1:]), 0.0)
    coordinator.receive(5, Ready(ids=ids[:1]), 0.0)
    coordinator.receive(1, Ready(ids=ids[1:2]), 0.0)
    ran = [batch for out in coordinator.decide(0.0) if isinstance(out.message, Run) for batch in out.message.batches]
    assert sorted(ran) == [(id,) for id in ids]


@pytest.mark.parametrize("joins_first", [True, False])
def test_hosts_do_not_wait_for_a_host_that_has_joined(joins_first):
    coordinator = Coordinator(ProcessSets(6), Parameters(fusion_threshold=0))
    ids = tuple(known_id(coordinator, range(6), replace(TENSOR, name=name)) for name in "ab")
    messages = [(first, Together((first, first + 1), ids)) for first in (0, 2)]
    joins = [(rank, Ready((Request("join", Operation.JOIN),))) for rank in (4, 5)]
    for rank, message in joins + messages if joins_first else messages + joins:
        coordinator.receive(rank, message, 0.0)
    ran = [batch for out in coordinator.decide(0.0) if isinstance(out.message, Run) for batch in out.message.batches]
    assert len(ran) == 2


def test_a_host_speaks_for_its_ranks_about_a_new_tensor():
    coordinator = Coordinator(ProcessSets(4), Parameters(cycle_time=CYCLE, patient=True))
    together = Together((2, 3), requests=(TENSOR,), urgent=(TENSOR.key,))
    assert list(coordinator.submissions(2, together)) == [(TENSOR.key, (2, 3), False)]
    coordinator.receive(2, together, 0.0)
    assert coordinator.waiting()[0, "a"].submitted == (2, 3)
    coordinator.receive(0, Together((0, 1), requests=(TENSOR,)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    assert outgoing.message.responses[0].request == TENSOR


def test_a_host_waits_for_its_ranks():
    coordinator = Coordinator(ProcessSets(2), Parameters(cycle_time=CYCLE, patient=True))
    id = known_id_of_patient(coordinator)
    coordinator.receive(0, Together((0, 1), (id,), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Run(((id,),), first=1))]
    coordinator.receive(0, Together((0, 1), (id,)), 0.0)
    assert not coordinator.decide(0.0)
    coordinator.receive(0, Together((0, 1), (), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Run(((id,),), begins_rounds=True, first=2))]


def known_id_of_patient(coordinator):
    for rank in range(2):
        coordinator.receive(rank, Ready((TENSOR,), urgent=(TENSOR.key,)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    return outgoing.message.batches[0][0]


def test_a_host_that_sends_what_was_dropped_is_asked_again():
    coordinator = Coordinator(ProcessSets(2), Parameters(cache_capacity=1))
    id = known_id(coordinator, range(2))
    known_id(coordinator, range(2), replace(TENSOR, name="b"))
    coordinator.receive(0, Together((0, 1), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Unknown((id,)))]


def test_a_rank_of_a_host_that_changed_its_mind():
    coordinator = Coordinator(ProcessSets(3), Parameters())
    id = known_id(coordinator, range(3))
    coordinator.receive(1, Together((1, 2), (id,)), 0.0)
    coordinator.receive(0, Ready((replace(TENSOR, shape=(5,)),)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    assert isinstance(outgoing.message, Refuse)
    assert "(5,) on rank 0; (4,) on ranks 1, 2" in outgoing.message.text
    assert sorted(outgoing.ranks) == [0, 1, 2]
