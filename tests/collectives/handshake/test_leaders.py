"""The start of a large world: leaders admit the ranks of their hosts, and rank 0 has a connection for each host."""

import threading
import time

import msgpack
import pytest

from collectives.api import CollectiveTimeoutError, EngineError, PeerLostError, SettingsError, ShutDownError
from collectives.controller.errors import unpack
from collectives.controller.messages import Stop, decode, encode
from collectives.handshake import Hello, admission, dial, hello, leaders, listeners, search
from collectives.handshake.entries import Starts
from collectives.handshake.hello import unpack_answer
from collectives.net.relay import Center, Follower, Leader
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome, until
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, SECRET, connect
from tests.collectives.net.test_sockets import receive

HOSTS = ("a", "a", "b", "b", "b", "c", "c")
SIZE = len(HOSTS)
LEADERS = {3: 2, 4: 2, 6: 5}
GONE = "gone"


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """These worlds are large, and no rank that runs is too slow to answer."""
    monkeypatch.setattr(hello, "MOST_DIRECT", 1)
    monkeypatch.setattr(dial, "REASON_SECONDS", PATIENCE)
    monkeypatch.setattr(admission, "QUESTION_SECONDS", 1.0)


def local(rank, hosts=HOSTS):
    """As a launcher counts."""
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def start(
    body=None,
    absent=(),
    timeouts=None,
    hosts=HOSTS,
    locals=None,
    hellos=None,
    offer=None,
    store=None,
    starts=None,
    failed=0,
):
    """What ``body(result)`` returns on each rank whose handshake ends well, the error on others, ``failed`` of them."""

    def run(rank):
        if rank in absent:
            return GONE
        patience = (timeouts or {}).get(rank, PATIENCE)
        mine = (hellos or {}).get(rank) or Hello(rank, len(hosts), hosts[rank])
        place = locals(rank) if locals else local(rank, hosts)
        offers = (lambda *_: offer(rank)) if offer else (lambda *_: b"of %d" % rank)
        known = starts[rank] if starts else None
        result = outcome(lambda: connect(mine, store, SECRET, LOCALHOST, patience, offers, known, place))
        if isinstance(result, Exception):
            return result
        results[rank] = result
        everybody.wait(PATIENCE)
        try:
            return body(result) if body else None
        finally:
            everybody.wait(PATIENCE)
            result.channel.close()

    results, everybody = {}, threading.Barrier(len(hosts) - len(absent) - failed)
    store = store or MemoryStore()
    return in_threads(len(hosts), run, 2 * PATIENCE)


def talk(result):
    """What rank 0 hears from all, and each rank from rank 0."""
    channel, rank = result.channel, result.channel.rank
    if rank:
        channel.send(0, encode(Stop(rank)))
        return receive(channel, 1)
    found = sorted(receive(channel, channel.size - 1))
    channel.send_to(range(1, channel.size), encode(Stop(0)))
    return found


def test_all_ranks_learn_the_hosts_and_the_offers_and_can_talk():
    def body(result):
        assert result.hosts == HOSTS
        assert result.offers == tuple(b"of %d" % rank for rank in range(SIZE))
        return talk(result)

    said, *heard = start(body)
    assert said == [(rank, encode(Stop(rank))) for rank in range(1, SIZE)]
    assert heard == [[(0, encode(Stop(0)))]] * (SIZE - 1)


def test_rank_0_has_a_connection_for_each_other_host_and_for_each_rank_of_its_own():
    begin = time.monotonic()
    kinds = start(lambda result: (type(result.channel), sorted(result.channel._connections), result.channel.leaders))
    assert time.monotonic() - begin < PATIENCE / 2, "rank 1 waits for no leader"
    assert kinds[0] == (Center, [1, 2, 5], LEADERS)
    assert [kind for kind, _, _ in kinds[2:]] == [Leader, Follower, Follower, Leader, Follower]
    assert [peers for _, peers, _ in kinds[1:]] == [[0], [0], [2], [2], [0], [5]]


def test_rank_0_sets_descriptors_aside_for_hosts_not_for_ranks(monkeypatch):
    """Few would be left for connections that are not authenticated yet, and most of them would be dropped."""
    counts = []
    make = admission.Candidates

    def recorded(end, listeners, poller, count, admit):
        counts.append((end.hello.rank, count))
        return make(end, listeners, poller, count, admit)

    monkeypatch.setattr(admission, "Candidates", recorded)
    start(hosts=("a", "a", "b", "b", "c", "c", "d", "d", "e", "e"))
    assert sorted(counts) == [(0, 6), *((rank, 2) for rank in (2, 4, 6, 8))]


def test_up_to_the_bound_nothing_differs(monkeypatch):
    monkeypatch.setattr(hello, "MOST_DIRECT", SIZE)
    kinds = start(lambda result: (len(result.channel.leaders), len(result.channel.relayed)))
    assert kinds == [(0, 3), (0, 0), (0, 0), (0, 1), (0, 1), (0, 0), (0, 1)]


def test_a_launcher_that_says_nothing_about_hosts_gets_the_relays_of_a_small_world():
    kinds = start(lambda result: (len(result.channel.leaders), len(result.channel.relayed)), locals=lambda rank: (0, 1))
    assert kinds == [(0, 3), (0, 0), (0, 0), (0, 1), (0, 1), (0, 0), (0, 1)]


def test_ranks_whose_launcher_counts_as_it_likes_find_any_leader():
    """Local rank 0 is the last rank of its host here, and another host has two of them."""
    counts = [(0, 2), (1, 2), (2, 3), (1, 3), (0, 3), (0, 2), (0, 2)]
    said, *_ = start(talk, locals=counts.__getitem__)
    assert said == [(rank, encode(Stop(rank))) for rank in range(1, SIZE)]


def test_the_ranks_start_again_in_the_same_world():
    """The entries of the last start are still there, and nobody listens at them."""
    store, starts = MemoryStore(), [Starts() for _ in HOSTS]
    for _ in range(3):
        assert start(talk, store=store, starts=starts)[6] == [(0, encode(Stop(0)))]


def test_a_start_that_succeeds_leaves_no_entries_of_leaders():
    store = MemoryStore()
    start(store=store)
    assert not [key for key in store._values if "leader" in key]


def test_long_answers_are_compressed(monkeypatch):
    """As those of a large world, in which each rank learns the addresses of all."""
    monkeypatch.setattr(hello, "LONG_ANSWER", 10)
    sent = []
    pack = admission.pack_answer
    monkeypatch.setattr(admission, "pack_answer", lambda *args: sent.append(pack(*args)) or sent[-1])
    found = start(lambda result: result.offers, offer=lambda rank: b"of %d, and this" % rank * 100)
    assert found == [tuple(b"of %d, and this" % rank * 100 for rank in range(SIZE))] * SIZE
    assert max(map(len, sent)) < 1000


# Ranks that do not come.


@pytest.mark.parametrize("missing", [1, 3, 6])
def test_a_rank_that_does_not_come_is_named_by_all(missing):
    errors = start(absent=(missing,), timeouts={0: 1.5})
    for error in errors[:missing] + errors[missing + 1 :]:
        assert type(error) is CollectiveTimeoutError, error
        assert error.ranks == (missing,), error


def test_a_leader_that_does_not_come_is_named_by_all(monkeypatch):
    """Its followers call rank 0 themselves, in half of their time."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.1)
    errors = start(absent=(2,), timeouts=dict.fromkeys((3, 4), 2.0) | {0: 4.0})
    for rank in (0, 1, 3, 4, 5, 6):
        assert type(errors[rank]) is CollectiveTimeoutError, errors[rank]
        assert errors[rank].ranks == (2,), errors[rank]


def test_a_follower_that_waits_for_its_leader_hears_that_the_start_has_failed(monkeypatch):
    """Rank 0 gives up long before the follower would call it."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.1)
    begin = time.monotonic()
    errors = start(absent=(2,), timeouts={0: 1.0})
    assert time.monotonic() - begin < PATIENCE / 2
    assert len({str(error) for rank, error in enumerate(errors) if rank != 2}) == 1
    assert errors[3].ranks == (2, 3, 4)


def test_a_follower_that_waits_for_its_leader_hears_of_the_next_start(monkeypatch):
    """It knows nothing of the start of rank 0 before, as opposed to its leader."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.1)
    store, starts = MemoryStore(), [Starts() for _ in HOSTS]
    store.set(KEY, msgpack.packb({"id": "before", "host": "a", "unix": "\0hvd-cluster-nobody", "tcp": [LOCALHOST, 1]}))
    for rank in (0, 2):
        starts[rank].passed(("job", 0), 0)
    begin = time.monotonic()
    assert start(lambda result: result.hosts, store=store, starts=starts) == [HOSTS] * SIZE
    assert time.monotonic() - begin < PATIENCE / 2


def test_a_leader_that_ended_before_it_called_rank_0_is_named_by_all(monkeypatch):
    """Its followers find nobody at its address."""
    nobody = {"id": "1", "host": "b", "unix": "\0hvd-cluster-nobody", "tcp": [LOCALHOST, 1], "rank": 2}
    monkeypatch.setattr(search, "_await_leader", lambda *_: nobody)
    errors = start(absent=(2,), timeouts={0: 2.0}, hosts=HOSTS[:5])
    for rank in (0, 1, 3, 4):
        assert type(errors[rank]) is CollectiveTimeoutError, errors[rank]
        assert errors[rank].ranks == (2,), errors[rank]


def test_a_leader_that_comes_late_leads_those_that_wait_for_it(monkeypatch):
    def late(*args):
        until(lambda: waiting)
        return publish(*args)

    def wait(*args):
        waiting.append(args)
        return await_leader(*args)

    waiting, publish, await_leader = [], leaders.Forwarder.publish, search._await_leader
    monkeypatch.setattr(leaders.Forwarder, "publish", late)
    monkeypatch.setattr(search, "_await_leader", wait)
    assert start(lambda result: result.channel.leaders)[0] == LEADERS


# Ranks that fail.


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(("error", "kind"), [(SettingsError, SettingsError), (OSError, EngineError)])
def test_a_rank_without_an_offer_ends_the_start_of_all_with_one_reason(failing, error, kind):
    def offer(rank):
        if rank == failing:
            raise error("no port")
        return b""

    errors = start(offer=offer)
    assert type(errors.pop(failing)) is error
    assert {type(each) for each in errors} == {kind}, errors
    assert all("no port" in str(each) for each in errors)


def test_a_configuration_that_differs_is_a_mistake_that_all_hear_of():
    odd = Hello(4, SIZE, "b", configuration={"HVD": "1"})
    errors = start(hellos={4: odd})
    assert {type(each) for each in errors} == {SettingsError}
    assert len({str(each) for each in errors}) == 1
    assert "HVD is '' on ranks 0, 1, 2, 3, 5, 6 and '1' on rank 4" in str(errors[0])


@pytest.mark.parametrize("place", [4, 6])
def test_two_processes_of_one_rank_are_a_mistake_of_the_launcher(place):
    """On one host the leader finds out, on two hosts rank 0."""
    errors = start(hellos={place: Hello(3, SIZE, HOSTS[place])})
    assert all(isinstance(each, SettingsError | PeerLostError) for each in errors)
    assert "two processes have HOROVOD_RANK=3" in str(errors[0])
    assert str(errors[1]) == str(errors[5]) == str(errors[0])


def test_another_size_is_a_mistake_of_the_launcher():
    errors = start(hellos={6: Hello(6, SIZE + 1, "c")})
    assert {type(each) for each in errors} == {SettingsError}
    assert "rank 6 was started for 8 ranks" in str(errors[0])


@pytest.mark.parametrize("victim", [2, 3, 5])
def test_a_rank_that_gives_up_is_named_by_all(victim):
    """Its process is interrupted after its hello."""

    def offer(rank):
        if rank == victim:
            raise ShutDownError("interrupted by a person")
        return b""

    errors = start(offer=offer)
    assert all("interrupted by a person" in str(each) for each in errors), errors


@pytest.mark.parametrize("victim", [1, 2, 4, 5, 6])
def test_a_rank_that_stops_before_its_offer_is_named_by_all(victim):
    """Rank 0 gives up first. The stopped rank goes on much later; those that it leads hear of rank 0 then."""

    def offer(rank):
        if rank == victim:
            over.wait(PATIENCE)
        return b""

    over, exit_ = threading.Event(), admission.Admission.dismiss

    def dismiss(self, error):
        exit_(self, error)
        if self._end.hello.rank == 0:
            over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission.Admission, "dismiss", dismiss)
        errors = start(offer=offer, timeouts={0: 1.5})
    for rank, error in enumerate(errors):
        assert type(error) is CollectiveTimeoutError, (rank, error)
        assert error.ranks == (victim,), (rank, error)


@pytest.mark.parametrize("victim", [1, 2, 3, 5, 6])
def test_a_rank_that_ends_without_a_word_is_named_by_all(victim, monkeypatch):
    """As a killed process does."""

    def offer(rank):
        if rank == victim:
            victims.append(threading.get_ident())
            raise PeerLostError("killed", [victim])
        return b""

    def speechless(step):
        return lambda *args: None if threading.get_ident() in victims else step(*args)

    def end(self, error):
        if threading.get_ident() in victims:
            self.connections = {rank: connection.close() for rank, connection in self.connections.items()}
        else:
            dismiss(self, error)

    victims, dismiss = [], leaders.Forwarder.dismiss
    monkeypatch.setattr(dial.Callee, "_leave", speechless(dial.Callee._leave))
    monkeypatch.setattr(leaders.Superior, "_leave", speechless(leaders.Superior._leave))
    monkeypatch.setattr(leaders.Forwarder, "dismiss", end)
    for rank, error in enumerate(start(offer=offer)):
        assert isinstance(error, PeerLostError), (rank, error)
        assert error.ranks == (victim,), (rank, error)


def test_the_text_tells_of_missing_ranks_beside_stopped_ones():
    """Leader 2 stops, and rank 6 never comes."""

    def stopped(self, center):
        if self._end.hello.rank == 2:
            over.wait(PATIENCE)
        serve(self, center)

    def dismiss(self, error):
        exit_(self, error)
        over.set()

    over, serve, exit_ = threading.Event(), leaders.Forwarder.serve, admission.Admission.dismiss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaders.Forwarder, "serve", stopped)
        patch.setattr(admission.Admission, "dismiss", dismiss)
        errors = start(timeouts={0: 1.5}, absent=(6,))
    assert errors[0].ranks == (2,)
    assert "ranks [2] were reached" in str(errors[0])
    assert "ranks [3, 4, 6] did not come" in str(errors[0])


def test_a_leader_that_stops_before_it_admits_anybody_is_named_by_all(monkeypatch):
    """Its followers do not come either. It goes on much later."""
    over, serve, exit_ = threading.Event(), leaders.Forwarder.serve, admission.Admission.dismiss

    def stopped(self, center):
        if self._end.hello.rank == 2:
            over.wait(PATIENCE)
        serve(self, center)

    def dismiss(self, error):
        exit_(self, error)
        over.set()

    monkeypatch.setattr(leaders.Forwarder, "serve", stopped)
    monkeypatch.setattr(admission.Admission, "dismiss", dismiss)
    for rank, error in enumerate(start(timeouts={0: 1.5})):
        assert type(error) is CollectiveTimeoutError, (rank, error)
        assert error.ranks == (2,), (rank, error)


def test_a_leader_that_rank_0_drops_calls_again_and_says_again_what_its_followers_said(monkeypatch):
    """Rank 0 closes silent connections where it has too many."""
    attend, forward, dropped, forwarded = listeners.Candidates.attend, leaders.Forwarder._forward, [], []

    def drop(self, descriptor):
        if self._end.hello.rank == 0 and descriptor in self._waiting and not dropped:
            until(lambda: len(forwarded) == 2)
            dropped.append(descriptor)
            self._release(descriptor).close()
        else:
            attend(self, descriptor)

    monkeypatch.setattr(listeners.Candidates, "attend", drop)
    monkeypatch.setattr(leaders.Forwarder, "_forward", lambda *args: (forward(*args), forwarded.append(args)))
    assert start(lambda result: result.channel.leaders, hosts=("a", "b", "b", "b"))[0] == {2: 1, 3: 1}
    assert dropped


def test_the_reason_of_a_leader_that_leaves_when_rank_0_has_connected_reaches_it(monkeypatch):
    """It is interrupted while it reads the last answer."""

    def interrupted(self, content):
        if self._end.hello.rank == 2 and unpack_answer(content)[0] == [None, b"of 0"]:
            raise ShutDownError("interrupted")
        tell(self, content)

    def body(result):
        if result.channel.rank:
            return None
        [(sender, data)] = receive(result.channel, 1)
        return sender, unpack(decode(data).error)

    tell = leaders.Forwarder.tell
    monkeypatch.setattr(leaders.Forwarder, "tell", interrupted)
    (sender, reason), *_ = start(body, failed=3)
    assert sender == 2
    assert "interrupted" in str(reason)


def test_the_reason_of_a_leader_that_is_interrupted_as_it_serves_reaches_the_channel_of_rank_0(monkeypatch):
    """Rank 0 has sent the last answer, which the leader has not read."""

    def interrupted(self, center):
        serve(self, center)
        served.append(self._end.hello.rank)
        if self._end.hello.rank == 2 and served.count(2) == 2:
            raise ShutDownError("interrupted")

    def body(result):
        if result.channel.rank:
            return None
        [(sender, data)] = receive(result.channel, 1)
        return sender, unpack(decode(data).error)

    served, serve = [], leaders.Forwarder.serve
    monkeypatch.setattr(leaders.Forwarder, "serve", interrupted)
    (sender, reason), *_ = start(body, failed=3)
    assert sender == 2
    assert "interrupted" in str(reason)


def test_rank_0_waits_for_no_reply_once_all_have_come(monkeypatch):
    monkeypatch.setattr(admission, "QUESTION_SECONDS", PATIENCE)
    begin = time.monotonic()
    errors = start(absent=(3,), timeouts={0: 1.0})
    assert time.monotonic() - begin < PATIENCE / 2
    assert errors[0].ranks == (3,)


def test_a_follower_that_waits_for_its_leader_hears_of_the_next_round(monkeypatch):
    """Rank 0 and the leader of its round have ended without a word."""
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.1)
    store, starts = MemoryStore(), [Starts() for _ in HOSTS]
    dead = {"id": "before", "host": "a", "unix": "\0hvd-cluster-nobody", "tcp": [LOCALHOST, 1]}
    store.set(KEY, msgpack.packb(dead))
    store.set("current", msgpack.packb((1, dead)))
    begin = time.monotonic()
    errors = start(absent=(0, 1, 2, 4, 5, 6), store=store, starts=starts)
    assert time.monotonic() - begin < PATIENCE / 4
    assert "rank 0 in round 1" in str(errors[3])
