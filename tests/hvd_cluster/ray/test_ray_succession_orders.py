"""Every order of losses, successors, ends and last reports of a job in which Ray Train replaces lost workers."""

import copy

import pytest

from executors.agents.ray.train.succession import Delivered, Succession
from executors.job.worlds import LastReport

LEFT_OUT, TAKEN = LastReport("4", "saved", is_left_out=True), LastReport("4", "saved")
# These come into the next world as soon as it has them.
COMERS = ("waiting", "cut off", "called")


class Orders:
    """A model of the workers and of Ray Train around the real succession, at one moment of one order of events.

    A worker is new, waiting for its first world, in a world, cut off, finished, called back, repeating its last report,
    dead or over. If they ``need_peers``, those in a broken world do not finish before they are in the next one.
    """

    def __init__(self, places, losses, last, need_peers):
        self.succession = Succession(["a"] * places)
        self.states = {worker: ("in", 0) for worker in self.succession.workers}
        self.lasts = dict.fromkeys(self.succession.workers, last)
        self.members = {0: tuple(self.succession.workers)}
        self.with_state = set(self.succession.workers)
        self.losses, self.need_peers = losses, need_peers
        self.is_early = self.is_on_its_way = False
        self.is_delivered = last is None

    @property
    def workers(self):
        return self.succession.workers

    def state(self, worker):
        return self.states[worker][0]

    def key(self):
        """Equal for orders that have led to the same."""
        own = {name: value for name, value in vars(self).items() if name != "succession"}
        decided = {name: value for name, value in vars(self.succession).items() if name != "_hosts"}
        return repr([(name, _sorted(value)) for each in (own, decided) for name, value in sorted(each.items())])

    # Events that are possible now.

    def events(self):
        found = [(event, worker) for worker in self.workers for event in self._events_of(worker)]
        if self.is_on_its_way:
            found.append(("deliver", ""))
        elif self.is_early:
            found.append(("conclude", ""))
        if self._can_form():
            found.append(("form", ""))
        if all(self.state(worker) == "repeating" for worker in self.workers):
            found.append(("report", ""))
        return found

    def _events_of(self, worker):
        state = self.state(worker)
        broken = state == "in" and self._is_broken(worker)
        if state == "dead":
            yield "replace"
        elif self.losses and sum(self.state(each) != "dead" for each in self.workers) > 1:
            yield "die"  # if all have died, Ray Train starts all anew
        if state == "new":
            yield "ready"
        if broken:
            yield "cut"
        if state == "in" and not (broken and self.need_peers):
            yield "finish"
        if state == "repeating" and any(self.state(each) != "repeating" for each in self.workers):
            yield "reset"

    def _is_broken(self, worker):
        own, world = self.states[worker], self.succession.world
        is_replaced = own[1] < world.round and worker in dict(world.workers)
        return is_replaced or any(self.states[each] != own for each in self.members[own[1]])

    def _can_form(self):
        world = self.succession.world
        names = [worker for worker, _ in world.workers]
        return not world.is_over and all(
            self.state(name) in COMERS and self.states[name][1] < world.round for name in names
        )

    # Their consequences.

    def play(self, event, worker):
        getattr(self, event)(worker)
        return self

    def _put(self, worker, state):
        self.states[worker] = (state, self.states[worker][1])

    def _turn(self, turn):
        self.is_early = turn.is_early
        for worker, answer in turn.answers.items():
            if answer.kind == "end":
                self._check_end()
            if self.state(worker) != "dead":
                assert self.state(worker) == "finished"
        for worker, answer in turn.answers.items():
            if self.state(worker) != "dead":
                self._put(worker, {"end": "over", "report": "repeating", "return": "called"}[answer.kind])
        if turn.world is not None and turn.world.is_over:
            for worker in self.workers:
                assert self.state(worker) in ("over", "waiting", "dead")
                self._put(worker, "dead" if self.state(worker) == "dead" else "over")

    def _check_end(self):
        """A failure that nobody has repaired is no success. After a loss, the last report is there, if any has it."""
        assert {self.state(worker) for worker in self.workers} <= {"finished", "dead"}
        has_last = any(self.lasts[worker] for worker in self.workers)
        assert self.is_delivered or not has_last or not self.succession._lost

    def die(self, worker):
        self.losses -= 1
        self._put(worker, "dead")
        self.with_state.discard(worker)

    def replace(self, worker):
        place = self.workers.index(worker)
        self.succession.lose(place, "ended")
        successor = self.succession.succeed(place, "a")
        self.states[successor], self.lasts[successor] = ("new", -1), None
        self.is_on_its_way = False  # Ray Train forgets it

    def ready(self, worker):
        self._put(worker, "waiting")
        self._turn(self.succession.ready(worker))

    def cut(self, worker):
        self._put(worker, "cut off")
        self._turn(self.succession.cut_off(worker, self.states[worker][1]))

    def form(self, _):
        names = tuple(worker for worker, _ in self.succession.world.workers)
        assert self.with_state & set(names) or not self.with_state, "the state is elsewhere"
        self.members[self.succession.world.round] = names
        self.with_state |= set(names)
        for name in names:
            self.states[name] = ("in", self.succession.world.round)
        self.succession.formed(self.succession.world.round)

    def finish(self, worker):
        self._put(worker, "finished")
        self._turn(self.succession.finished(worker, self.states[worker][1], self.lasts[worker]))

    def reset(self, worker):
        self.lasts[worker] = LEFT_OUT
        self.finish(worker)

    def report(self, _):
        self.is_on_its_way = True
        for worker in self.workers:
            self.lasts[worker] = TAKEN
            self.finish(worker)

    def deliver(self, _):
        self.is_on_its_way, self.is_delivered = False, True
        self._turn(self.succession.delivered(Delivered(("4",) * len(self.workers), "saved")))

    def conclude(self, _):
        self._turn(self.succession.conclude())


def _sorted(value):
    return sorted(value, key=str) if isinstance(value, set) else value


@pytest.mark.parametrize("need_peers", [False, True])
@pytest.mark.parametrize(
    ("places", "losses", "last"),
    [(1, 0, None), (2, 1, None), (2, 1, TAKEN), (2, 2, LEFT_OUT), (3, 1, LEFT_OUT)],
)
def test_every_order_ends_and_never_with_a_failure_that_nobody_repaired(places, losses, last, need_peers):
    waiting, known, ends = [(Orders(places, losses, last, need_peers), ())], set(), 0
    while waiting:
        orders, path = waiting.pop()
        if orders.key() in known:
            continue
        known.add(orders.key())
        events = orders.events()
        if not events:
            assert {orders.state(worker) for worker in orders.workers} == {"over"}, path
            ends += 1
        waiting += [(copy.deepcopy(orders).play(*event), (*path, event)) for event in events]
    assert ends


class TestLastReport:
    def job(self, last):
        succession = Succession(["a", "a"])
        succession.lose(1, "ended")
        succession.ready(succession.succeed(1, "a"))
        succession.formed(1)
        return succession, succession.finished("worker-0", 1, last)

    @pytest.mark.parametrize("last", [LEFT_OUT, TAKEN])
    def test_one_that_is_lost_is_made_again_with_the_metrics_of_a_worker_that_has_one(self, last):
        succession, turn = self.job(last)
        assert not turn.answers
        turn = succession.finished("worker-2", 1, None)
        assert turn.is_early is not last.is_left_out
        turn = succession.conclude() if turn.is_early else turn
        assert {(each.kind, each.number, each.source) for each in turn.answers.values()} == {("report", 1, "worker-0")}
        assert set(turn.answers) == {"worker-0", "worker-2"}

    def test_one_that_ray_train_has_is_not_made_again(self):
        succession, _ = self.job(TAKEN)
        succession.delivered(Delivered(("4", "other"), "saved"))
        assert {each.kind for each in succession.finished("worker-2", 1, None).answers.values()} == {"end"}

    def test_it_is_made_again_three_times_at_most(self):
        succession, _ = self.job(LEFT_OUT)
        kinds = []
        for _ in range(4):
            succession.finished("worker-0", 1, LEFT_OUT)
            kinds.append({each.kind for each in succession.finished("worker-2", 1, LEFT_OUT).answers.values()})
        assert kinds == [{"report"}] * 3 + [{"end"}]
