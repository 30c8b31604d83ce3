"""Random lives of a job: whatever comes, every world that is published is one that the others can go on in."""

from hypothesis import given, settings
from hypothesis import strategies as st

from executors.membership import (
    Cooldown,
    End,
    HostDraining,
    HostFound,
    HostLost,
    Limits,
    Membership,
    Overdue,
    Publish,
    Start,
    StopWorker,
    Tick,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)

HOSTS = ("a", "b", "c")
LEAST, SIZE, MOST = 2, 3, 5


class Thorough(Membership):
    """Looks at all workers whenever a newcomer is ready."""

    def _may_change(self):
        return True


class Cluster:
    """The hosts and workers of a job, as far as a driver sees them, and the rules that its worlds keep."""

    def __init__(self, cooldown):
        limits = Limits(SIZE, LEAST, MOST, timeout=50.0, cooldown=cooldown)
        self.membership = Membership(limits, lambda: 0.0)
        self.thorough = Thorough(limits, lambda: 0.0)
        self.now = 0.0
        self.slots = {}
        self.alive = {}  # the host of each worker that runs
        self.started = set()
        self.left_out = set()  # by a world that was published; they may leave at any time from then on
        self.leaving = set()
        self.trained = []  # the workers of the last world that formed, in the order in which they got the state
        self.round = -1
        self.is_finishing = False
        self.end = None

    def tell(self, event):
        actions = self.membership.handle(event, self.now)
        assert actions == self.thorough.handle(event, self.now)
        assert self.membership.deadline == self.thorough.deadline
        for action in actions:
            assert self.end is None, "an action after the end"
            getattr(self, f"_{type(action).__name__.lower()}")(action)
        for late in [action for action in actions if isinstance(action, Overdue) and action.go_on]:
            [world] = [action for action in actions if isinstance(action, Publish)]
            assert not world.planned
            assert not set(world.members.workers) & set(late.workers)
        self._check()

    def _start(self, action: Start):
        assert action.worker not in self.started
        self.started.add(action.worker)
        self.alive[action.worker] = action.host
        on_host = [worker for worker, host in self.alive.items() if host == action.host]
        assert len(on_host) <= self.slots[action.host]
        assert not self.is_finishing

    def _stopworker(self, action: StopWorker):
        assert action.worker not in self.trained
        del self.alive[action.worker]

    def _publish(self, action: Publish):
        members = action.members.workers
        assert not self.leaving & set(members)
        self.left_out |= set(self.trained) - set(members)
        assert action.members.round == self.round + 1
        self.round += 1
        assert len(set(members)) == len(members)
        assert set(members) <= set(self.alive)
        assert len(members) <= MOST
        assert self.is_finishing or len(members) >= LEAST
        trained = [worker for worker in self.trained if worker in members]
        assert list(members[: len(trained)]) == trained
        assert trained or not self.trained

    def _overdue(self, action: Overdue):
        assert action.workers
        assert set(action.workers) <= {worker for worker, host in self.alive.items() if host == action.host}
        assert not self.slots[action.host]

    def _end(self, action: End):
        self.end = action

    def _check(self):
        membership = self.membership
        assert membership.deadline is None or membership.deadline > self.now
        if self.end is None and membership.deadline is None:
            assert set(membership.published.workers) <= set(self.alive), "a broken world, and nothing that will end it"

    # The events of the cluster.

    def find(self, host, slots):
        self.slots[host] = slots
        self.tell(HostFound(host, slots))

    def drain(self, host, seconds):
        self.slots[host] = 0
        self.tell(HostDraining(host, self.now + seconds if seconds else None))

    def lose(self, host, _):
        self.slots[host] = 0
        self.alive = {worker: place for worker, place in self.alive.items() if place != host}
        self.tell(HostLost(host, "gone"))

    def ready(self, _, number):
        if worker := self._worker(number):
            self.tell(WorkerReady(worker))

    def fail(self, _, number):
        if worker := self._worker(number):
            del self.alive[worker]
            self.tell(WorkerFailed(worker, "killed"))

    def fall_behind(self, _, number):
        if worker := self._worker(number):
            del self.alive[worker]
            self.tell(WorkerBehind(worker))

    def finish(self, _, number):
        if worker := self._worker(number):
            del self.alive[worker]
            is_member = worker in self.membership.published.workers and worker not in self.leaving
            self.is_finishing = self.is_finishing or is_member
            self.tell(WorkerDone(worker))

    def leave(self, _, number):
        if worker := self._worker(number):
            host = self.alive[worker]
            if worker in self.membership.published.workers and self.slots[host]:
                self.tell(WorkerDraining(worker))

    def hear(self, _, number):
        """A worker hears of a world without it."""
        left_out = sorted(self.left_out & set(self.alive))
        if left_out:
            worker = left_out[number % len(left_out)]
            self.leaving.add(worker)
            self.trained = [each for each in self.trained if each != worker]
            self.tell(WorkerLeaves(worker))

    def break_world(self, _, number):
        self.tell(WorldFailed(self.round - number // 4, "timed out"))

    def form(self, _, __):
        members = self.membership.published.workers
        if set(members) <= set(self.alive):
            earlier = [worker for worker in self.trained if worker in members]
            self.left_out -= set(members)
            self.trained = earlier + [worker for worker in members if worker not in earlier]
            self.tell(WorldFormed(self.round))

    def wait(self, _, number):
        self.now += number
        self.tell(Tick())

    def _worker(self, number):
        workers = list(self.alive)
        return workers[number % len(workers)] if workers else None


KINDS = (
    *("find", "drain", "lose", "leave", "break_world", "wait", "finish", "fall_behind", "hear"),
    *("ready", "ready", "ready", "fail", "form", "form"),
)
HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(HOSTS), st.integers(0, 4)), min_size=10, max_size=60
)


@settings(max_examples=400)
@given(HAPPENINGS, st.booleans())
def test_every_world_is_one_to_go_on_in(happenings, has_cooldown):
    cluster = Cluster(Cooldown(1.0, 8.0) if has_cooldown else None)
    for host in HOSTS[:2]:
        cluster.find(host, 2)
    for kind, host, number in happenings:
        getattr(cluster, kind)(host, number)


@settings(max_examples=200)
@given(HAPPENINGS)
def test_a_job_with_enough_hosts_and_time_runs_or_ends(happenings):
    cluster = Cluster(None)
    for kind, host, number in happenings:
        getattr(cluster, kind)(host, number)
    cluster.find("fresh", MOST)
    for worker in list(cluster.alive):
        cluster.tell(WorkerReady(worker))
    cluster.wait(None, 1)
    published = cluster.membership.published.workers
    assert cluster.end is not None or (published and set(published) <= set(cluster.alive))
