"""Callbacks of users after a change of ranks: their collectives meet on all ranks, and all ranks have one result."""

import pytest

from collectives.api import HorovodInternalError
from hvd_cluster.core import basics
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.ops.objects import allgather_object, broadcast_object

STEPS = 9
EVENTS = {
    "kill": ([(0, 1, 2), (0, 2)], {0}),
    "growth": ([(0, 1), (0, 1, 2, 3)], set()),
    "removal": ([(0, 1, 2), (0, 2)], set()),
    "replacement": ([(0, 1, 2), (1, 2, 3)], {0}),
    "kill and growth": ([(0, 1), (0, 1, 2, 3), (0, 2, 3), (0, 2, 3, 4)], {1}),
}


@pytest.fixture(params=EVENTS)
def event(request):
    return EVENTS[request.param]


def training(me, state, note=lambda: None):
    """Steps to STEPS; each world but the last ends after two steps more than the one before, as the event says."""

    @run
    def train(state):
        note()
        while state.step < STEPS:
            assert len(set(allgather_object((state.step, basics.size()), "step"))) == 1
            state.step += 1
            if me.round + 1 < len(me.play.worlds) and state.step == 2 * (me.round + 1):
                if me.round not in me.play.ends_by_loss:
                    me.end_world()
                elif me.number not in me.play.worlds[me.round + 1]:
                    me.die()
            state.commit()

    train(state)
    assert state.step == STEPS


def finals(play, event, script):
    """The result of the workers of the last world, which is the same on all."""
    worlds, losses = event
    found = play(worlds, script, losses)
    assert [number for number, result in found.items() if result is not None] == sorted(worlds[-1])
    results = [found[number] for number in worlds[-1]]
    assert all(result == results[0] for result in results), results
    return results[0]


def allgather(state):
    return allgather_object((state.step, state.rate), "callback")


def broadcast(state):
    return [broadcast_object((state.step, state.rate), root_rank=basics.size() - 1, name="callback")]


@pytest.mark.parametrize("collective", [allgather, broadcast])
def test_collectives_of_callbacks_meet_on_all_ranks_and_find_one_state(play, event, collective):
    def script(me):
        state = ObjectState(step=0, rate=1.0, log=[])

        def on_state_reset():
            assert len({str(each) for each in collective(state)}) == 1
            state.rate = float(basics.size())
            state.log.append(collective(state)[0])

        state.register_reset_callbacks([on_state_reset])
        training(me, state)
        return state.rate, state.log

    worlds = event[0]
    rate, log = finals(play, event, script)
    assert rate == len(worlds[-1])
    assert [entry[1] for entry in log] == [len(world) for world in worlds[1:]]


def test_a_newcomer_gets_what_callbacks_make_of_the_state_of_rank_0(play, event):
    """A factor is not applied twice, whatever size a newcomer believed to come into."""

    def script(me):
        sizes = [basics.size()]
        state = ObjectState(step=0, rate=float(basics.size()))

        def scale():
            state.rate *= basics.size() / sizes[-1]
            sizes.append(basics.size())

        state.register_reset_callbacks([scale])
        training(me, state)
        return state.rate

    assert finals(play, event, script) == pytest.approx(len(event[0][-1]))


def test_a_loss_in_a_callback_leaves_no_trace_of_it(play):
    worlds = [(0, 1, 2), (0, 1, 2, 3), (0, 2, 3)]

    def script(me):
        state = ObjectState(step=0, rate=1)

        def scale():
            state.rate *= 10
            allgather_object(0, "callback")
            if me.round == 1 and me.number == 1:
                me.die()
            allgather_object(1, "callback")

        state.register_reset_callbacks([scale])
        training(me, state)
        return state.rate, state.lost_commits

    assert finals(play, (worlds, {1}), script) == (10, 0)


def test_callbacks_of_rank_0_alone_and_a_commit_in_a_callback(play, event):
    def script(me):
        state = ObjectState(step=0, calls=0)

        def commit():
            state.calls += 1
            state.commit()

        state.register_reset_callbacks([commit])
        if basics.rank() == 0:
            state.register_reset_callbacks([lambda: setattr(state, "calls", state.calls + 10)])
        training(me, state)
        return state.calls

    survivor = 0 in event[0][-1]
    assert finals(play, event, script) == (11 if survivor else 1) * (len(event[0]) - 1)


class Adapting(ObjectState):
    """Overrides what Horovod's State calls after a change."""

    def reset(self):
        self.sizes = [*self.sizes, *{size for _, size in allgather_object((self.step, basics.size()), "reset")}]

    def on_reset(self):
        super().on_reset()
        self.resets = sum(allgather_object(self.resets, "on_reset")) / basics.size() + 1


def test_own_resets_meet_on_all_ranks(play, event):
    def script(me):
        state = Adapting(step=0, sizes=[], resets=0)
        training(me, state)
        return state.sizes, state.resets

    sizes = [len(world) for world in event[0][1:]]
    assert finals(play, event, script) == (sizes, len(sizes))


class Minimal(State):
    """A state as scripts for Horovod write them."""

    def __init__(self):
        super().__init__(broadcast_object, basics.rank)
        self.step, self.sizes, self.saved = 0, [], (0, [])

    def save(self):
        self.saved = self.step, list(self.sizes)

    def restore(self):
        self.step, self.sizes = self.saved[0], list(self.saved[1])

    def sync(self):
        self.step, self.sizes = self.saved = self._bcast_object((self.step, self.sizes), 0, "minimal")


def test_a_state_of_the_users_own(play, event):
    def script(me):
        state = Minimal()
        state.register_reset_callbacks([lambda: state.sizes.append(len(allgather_object(state.step, "callback")))])
        training(me, state)
        return state.sizes

    assert finals(play, event, script) == [len(world) for world in event[0][1:]]


def test_no_callback_runs_at_the_start_and_none_costs_nothing(play):
    def script(me):
        state, calls = ObjectState(step=0), []
        state.register_reset_callbacks([lambda: calls.append(1)] * (me.play.worlds[-1] == (0, 1, 2)))
        shared, state._reset_together = [], lambda: shared.append(1)
        training(me, state)
        return calls, shared

    assert finals(play, ([(0, 1)], set()), script) == ([], [])
    assert finals(play, ([(0, 1), (0, 1, 3)], set()), script) == ([], [])


def test_the_order_of_a_change(play):
    calls = {}

    class Told(ObjectState):
        def sync(self):
            calls.setdefault(me_of(), []).append("sync")
            super().sync()

    def script(me):
        nonlocal me_of
        me_of = lambda: me.number  # noqa: E731
        state = Told(step=0)
        state.register_reset_callbacks([lambda: calls[me.number].append("callback")])
        training(me, state, lambda: calls[me.number].append("train"))
        return 1

    me_of = None
    finals(play, EVENTS["growth"], script)
    survivor = ["sync", "train", "sync", "callback", "train"]
    assert calls == {0: survivor, 1: survivor, 2: survivor[2:], 3: survivor[2:]}


def test_an_error_of_a_collective_outside_of_a_world_is_not_swallowed(play):
    def script(me):
        state = ObjectState(step=0)
        state.register_reset_callbacks([lambda: (_ for _ in ()).throw(ValueError("bad callback"))])
        with pytest.raises((ValueError, HorovodInternalError)):
            training(me, state)
        return 1

    assert finals(play, EVENTS["growth"], script) == 1
