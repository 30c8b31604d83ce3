"""The parts of elastic jobs on Ray that need no cluster."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import cloudpickle
import pytest
from ray.exceptions import RayError

from executors.agents.ray import worker_log as logs
from executors.agents.ray.placement import autoscaler
from executors.agents.ray.placement.autoscaler import AutoscalerRequest, Demand
from executors.agents.ray.placement.capacity import Cluster, JobDemand, Node, Share, fits, matches, slots, total_demand
from executors.agents.ray.placement.nodes import Departures, Names, NodePlace, how
from executors.api import ExecutorError
from executors.job.job import Job
from executors.job.loop import Loop
from hvd_cluster.ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery

# Ray opens connections for the cluster of other tests whenever it likes.
pytestmark = pytest.mark.leaves("descriptors", "processes")

SETTINGS = RayExecutor.create_settings()
NEED = {"CPU": 1.0}


class TestLoop:
    def test_actions_in_order_and_timers_by_their_time(self):
        now, called = [0.0], []
        loop = Loop(lambda: now[0])
        loop.after(2, lambda: called.append("late"))
        loop.after(1, lambda: called.append("early"))
        loop.soon(lambda: (called.append("first"), now.__setitem__(0, 5.0)))
        loop.run(lambda: len(called) == 3)
        assert called == ["first", "early", "late"]

    def test_another_thread_wakes_it(self):
        loop, called = Loop(), []
        thread = threading.Timer(0.05, loop.soon, [lambda: called.append("woken")])
        thread.start()
        loop.run(lambda: bool(called))
        thread.join()
        assert called == ["woken"]

    def test_an_error_ends_it(self):
        loop = Loop()
        loop.soon(lambda: {}["missing"])
        with pytest.raises(KeyError):
            loop.run(lambda: False)


def cluster(**free):
    """A cluster whose nodes have 4 CPUs each, of which so many are free."""
    return Cluster({name: Node({"CPU": 4.0, "memory": 9.0}, {"CPU": float(count)}) for name, count in free.items()})


class TestCapacity:
    def test_what_fits(self):
        assert fits({"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 3.0}) == 3
        assert fits({"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0}) == 0
        assert fits({"CPU": 1.0, "GPU": 0.1}, {"CPU": 8.0, "GPU": 0.3}) == 3

    def test_own_workers_and_what_is_free(self):
        shares = {"a": Share(2)}
        assert slots(cluster(a=1, b=4, c=0), NEED, shares, {}) == {"a": 3, "b": 4}

    def test_not_more_than_the_node_has(self):
        """A worker has just started, and Ray has not counted it yet."""
        assert slots(cluster(a=4), NEED, {"a": Share(2)}, {}) == {"a": 4}

    def test_a_number_stays_while_ray_counts(self):
        """Another job uses one CPU; Ray has not counted the worker that has just started."""
        assert slots(cluster(a=3), NEED, {"a": Share(1, settled=False)}, {"a": 3}) == {"a": 3}
        assert slots(cluster(a=2), NEED, {"a": Share(1, settled=True)}, {"a": 3}) == {"a": 3}

    def test_a_discovery_refuses_numbers(self):
        with pytest.raises(ValueError, match="cpus_per_worker is 0"):
            RayHostDiscovery(cpus_per_worker=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", True), ("!a", False), ("in(b, a)", True), ("in(b)", False), ("!in(a,b)", False), ("!in(c)", True)],
)
def test_label_selectors(text, expected):
    assert matches({"zone": "a", "other": "x"}, {"zone": text, "other": "x"}) is expected


def test_a_label_that_a_node_does_not_have():
    assert not matches({}, {"zone": "a"})
    assert matches({}, {"zone": "!a"})
    state = Cluster({"a": Node({}, {}, {"zone": "a"}), "b": Node({}, {})})
    assert list(state.with_labels({"zone": "!a"}).nodes) == ["b"]


def wants(workers, labels=None, need=None, **running):
    return JobDemand(workers, need or NEED, labels or {}, running)


class Remote:
    """Stands in for an actor whose calls are noted; ``error`` is that of the next one that is looked at."""

    def __init__(self):
        self.calls = []
        self.error = None

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.calls.append((name, *args[1:])) or self)


class TestDemand:
    @pytest.fixture
    def actors(self, monkeypatch):
        """Those that the demand has joined."""
        joined = []

        def get(actor, timeout=None):
            if actor.error is not None:
                raise actor.error

        monkeypatch.setattr(
            "executors.agents.ray.placement.autoscaler.ray.wait", lambda references, timeout: (references, [])
        )
        monkeypatch.setattr("executors.agents.ray.placement.autoscaler.ray.get", get)
        return joined

    def demand(self, actors, labels=None):
        return Demand(2, NEED, labels or {}, lambda job: actors.append(Remote()) or actors[-1])

    def test_asks_for_all_while_some_are_missing_then_for_none_and_leaves_at_the_end(self, actors):
        demand = self.demand(actors, {"zone": "a"})
        demand.update({"a": Share(2)})
        assert not actors
        for workers in (1, 2, 2, 0):
            demand.update({"a": Share(workers)})
        demand.withdraw()
        demand.withdraw()
        [actor] = actors
        zone = {"zone": "a"}
        assert actor.calls == [
            ("want", wants(2, zone, a=1)),
            ("want", None),
            ("want", wants(2, zone)),
            ("leave",),
        ]

    def test_a_job_that_misses_nobody_joins_nothing(self, actors):
        demand = self.demand(actors)
        demand.update({"a": Share(2)})
        demand.withdraw()
        assert not actors

    def test_a_failure_is_told_once_and_another_actor_is_asked(self, actors, caplog):
        demand = self.demand(actors)
        for _ in range(4):
            demand.update({})
            actors[-1].error = RuntimeError("the actor died")
        assert caplog.messages == ["the autoscaler could not be asked for 2 workers: the actor died"]
        assert [actor.calls for actor in actors] == [[("want", wants(2))]] * 2

    def test_a_cluster_that_is_gone_does_not_disturb_the_end(self, actors, caplog):
        demand = self.demand(actors)
        demand.update({})
        actors[0].error = RuntimeError("no cluster")
        demand.withdraw()
        assert caplog.messages == ["the request to the autoscaler could not be withdrawn: no cluster"]


class TestTotalDemand:
    def test_others_keep_what_they_use(self):
        assert total_demand([wants(2, a=1)], cluster(a=1)) == [(NEED, {}), (NEED, {}), ({"CPU": 2.0}, {})]

    def test_labels_are_for_the_workers(self):
        zone = {"zone": "a"}
        assert total_demand([wants(1, zone)], cluster(a=1)) == [(NEED, zone), ({"CPU": 3.0}, {})]

    def test_the_workers_of_each_job_count_once(self):
        two = {"CPU": 2.0, "memory": 1.0}
        found = total_demand([wants(2, a=1), wants(3, need=two, a=1, b=1)], cluster(a=1, b=1))
        assert found == [(NEED, {})] * 2 + [(two, {})] * 3 + [({"memory": 8.0}, {}), ({"CPU": 1.0, "memory": 8.0}, {})]


class TestAutoscalerRequest:
    """The actor, in the loop of the test."""

    def play(self, jobs):
        """The bundles of each request of the actor, which ``jobs(actor)`` calls."""
        asked = []

        async def run():
            actor = AutoscalerRequest(lambda bundles, **more: asked.append((len(bundles), *more)), lambda: cluster(a=4))
            await jobs(actor)

        asyncio.run(run())
        return asked

    def test_it_asks_for_all_jobs_and_only_for_news(self, monkeypatch):
        killed = []
        monkeypatch.setattr(AutoscalerRequest, "_end", lambda actor: killed.append(actor))  # noqa: PLW0108  a method

        async def jobs(actor):
            watched = [asyncio.ensure_future(actor.watch(name, [actor.present(name)])) for name in "ab"]
            await asyncio.sleep(0)  # both are present
            await actor.want("a", wants(2))
            await actor.want("b", wants(3, {"zone": "x"}))
            await actor.want("b", wants(3, {"zone": "x"}))
            await actor.leave("a")
            await watched[0]
            assert not killed
            await actor.leave("b")
            await watched[1]
            assert killed == [actor]

        assert self.play(jobs) == [(2,), (5, "bundle_label_selectors"), (3, "bundle_label_selectors"), (0,)]

    def test_it_takes_back_what_a_killed_job_wanted_and_ends(self, monkeypatch):
        killed = []
        monkeypatch.setattr(AutoscalerRequest, "_end", lambda actor: killed.append(actor))  # noqa: PLW0108  a method

        async def lost():
            raise RayError("the owner died")

        async def jobs(actor):
            present = asyncio.ensure_future(actor.present("a"))
            await actor.want("a", wants(2))
            await actor.watch("a", [lost()])
            assert killed == [actor]
            present.cancel()

        assert self.play(jobs) == [(2,), (0,)]

    def test_it_takes_back_what_a_job_wanted_at_any_end(self, monkeypatch):
        killed = []
        monkeypatch.setattr(AutoscalerRequest, "_end", lambda actor: killed.append(actor))  # noqa: PLW0108  a method

        async def broken():
            raise ValueError("no error of Ray")

        async def jobs(actor):
            await actor.want("a", wants(2))
            with pytest.raises(ValueError, match="no error of Ray"):
                await actor.watch("a", [broken()])
            assert killed == [actor]

        assert self.play(jobs) == [(2,), (0,)]

    def test_it_ends_where_the_request_cannot_be_taken_back(self, monkeypatch):
        killed = []
        monkeypatch.setattr(AutoscalerRequest, "_end", lambda actor: killed.append(actor))  # noqa: PLW0108  a method

        def refuse(bundles):
            if not bundles:
                raise RayError("no autoscaler")

        async def run():
            actor = AutoscalerRequest(refuse, lambda: cluster(a=4))
            await actor.want("a", wants(2))
            with pytest.raises(RayError, match="no autoscaler"):
                await actor.watch("a", [asyncio.sleep(0)])
            actor._unused.cancel()

        asyncio.run(run())
        assert len(killed) == 1

    def test_one_without_a_job_ends(self, monkeypatch):
        monkeypatch.setattr(autoscaler, "FIRST_CALL_S", 0.01)
        ended = threading.Event()
        monkeypatch.setattr(AutoscalerRequest, "_end", lambda actor: ended.set())
        AutoscalerRequest()
        assert ended.wait(10)


class TestDepartures:
    def test_each_time_and_each_change_is_told_once(self):
        known = {}
        departures = Departures(lambda: known, clock=lambda: 100.0)
        assert departures.news() == {}
        known |= {"a": 130.0, "b": 90.0}
        assert departures.news() == {"a": 30.0, "b": 0.0}
        assert departures.news() == {}
        known["a"] = 110.0
        assert departures.news() == {"a": 10.0}

    def test_a_node_that_drains_again_at_the_same_time_is_news(self):
        known = {"a": 130.0}
        departures = Departures(lambda: known, clock=lambda: 100.0)
        departures.news()
        known.clear()
        departures.news()
        known["a"] = 130.0
        assert departures.news() == {"a": 30.0}


class TestNames:
    PLACES = (
        NodePlace("f" * 50 + "00000001", "host", "10.0.0.1"),
        NodePlace("f" * 50 + "00000002", "host", "10.0.0.2"),
    )

    def test_ids_that_differ_at_the_end(self):
        names = Names(lambda: list(self.PLACES))
        found = names.slots({place.node: 2 for place in self.PLACES})
        assert found == {"host-00000001": 2, "host-00000002": 2}
        assert names.node("host-00000002") == self.PLACES[1].node
        assert names.name(self.PLACES[0].node) == "host-00000001"

    def test_addresses_of_a_discovery(self, caplog):
        names = Names(lambda: list(self.PLACES))
        for _ in range(2):
            assert names.slots({"10.0.0.2": 1, "host": 4, "10.0.0.3": 4}) == {"host-00000002": 1}
        assert [record.message.partition(":")[0] for record in caplog.records] == [
            "host host is not used",
            "host 10.0.0.3 is not used",
        ]

    def test_a_node_that_is_gone_keeps_its_name(self):
        places = list(self.PLACES)
        names = Names(lambda: places)
        names.slots({self.PLACES[0].node: 1})
        places.clear()
        assert names.slots({}) == {}
        assert names.node("host-00000001") == self.PLACES[0].node


class TestElasticRayExecutor:
    def test_settings_become_those_of_the_executor(self):
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=4, reset_limit=3, verbose=2)
        executor = ElasticRayExecutor(settings, cpus_per_slot=2)
        limits = executor._executor._workers.wanted.limits()
        assert (limits.size, limits.least, limits.most, limits.resets, limits.timeout) == (2, 2, 4, 3, 600.0)
        assert executor._executor._workers.options.need == {"CPU": 2.0}

    def test_a_discovery_of_the_user(self):
        settings = ElasticRayExecutor.create_settings(min_np=1, max_np=2)
        settings.discovery = RayHostDiscovery()
        executor = ElasticRayExecutor(settings, override_discovery=False)
        assert executor._executor._workers.options.discovery is settings.discovery

    @pytest.mark.parametrize(
        ("arguments", "error", "text"),
        [
            ({"min_num_proc": 3, "max_num_proc": 2}, ValueError, "min_workers is 3, max_workers is 2: give"),
            ({"flavour": 2}, TypeError, "flavour"),
        ],
    )
    def test_refused_settings(self, arguments, error, text):
        with pytest.raises(error, match=text):
            ElasticRayExecutor.create_settings(**arguments)

    def test_other_settings(self):
        with pytest.raises(ValueError, match=r"must be the result of ElasticRayExecutor\.create_settings"):
            ElasticRayExecutor(SETTINGS)

    def test_start_comes_first(self):
        with pytest.raises(ExecutorError, match=r"call start\(\) first"):
            ElasticRayExecutor(ElasticRayExecutor.create_settings()).run(print)


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: HorovodWorker
\tpid: 23265
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process"""

UNSCHEDULABLE = "The actor is not schedulable: The node doesn't exist any more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DIED, "died: Worker unexpectedly exits with a connection error code 2"),
        (UNSCHEDULABLE, f"died: {UNSCHEDULABLE}"),
    ],
)
def test_how_an_actor_died(text, expected):
    assert how(RuntimeError(text)) == expected


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"min_workers": 3, "max_workers": 2}, "min_workers is 3, max_workers is 2: give min_workers <= num"),
            ({"min_workers": 3, "num_workers": 2}, "min_workers is 3, num_workers is 2: give min_workers <= num"),
            ({"num_workers": 3, "max_workers": 2}, "num_workers is 3, max_workers is 2: give min_workers <= num"),
            ({"max_workers": 2}, "max_workers is 2, but the fewest workers are unknown: give min_workers as well"),
            ({"min_workers": 0}, "min_workers is 0, but must be an integer of at least 1"),
            ({"min_workers": 1, "max_workers": "2"}, "max_workers is '2', but must be an integer of at least 1"),
            ({"min_workers": 1, "reset_limit": -1}, "reset_limit is -1"),
            ({"min_workers": 1, "elastic_timeout": 0}, "elastic_timeout is 0, but must be a positive number of"),
            ({"min_workers": 1, "cooldown_range": (5, 1)}, "a cool-down of 5 to 1 s is not possible"),
            ({"min_workers": 1, "num_hosts": 2}, "num_hosts is 2, .* elastic job go where there is room: leave it out"),
            (
                {"min_workers": 1, "placement_strategy": "SPREAD"},
                "placement_strategy is 'SPREAD', but the workers of an",
            ),
            (
                {"min_workers": 1, "num_hosts": 1, "num_workers_per_host": 2},
                "num_hosts is 1 and num_workers_per_host is 2",
            ),
            (
                {"min_workers": 1, "bundle_label_selector": []},
                r"bundle_label_selector is \[\].* leave it out; label_sel",
            ),
            ({"min_workers": 1, "cpus_per_worker": 0}, "cpus_per_worker is 0"),
            ({"min_workers": 1, "override_discovery": False}, "discovery of the settings is None: give create_set"),
            (
                {"min_workers": 1, "label_selector": {"a": 1}},
                "label_selector is .*, but must be a dict of labels",
            ),
            ({"num_workers": 1, "reset_limit": 1}, "reset_limit: this is for elastic jobs; give min_workers"),
            ({"num_workers": 1, "elastic_timeout": 5}, "elastic_timeout: this is for elastic jobs; give min_workers"),
        ],
    )
    def test_refused(self, arguments, text):
        with pytest.raises(ValueError, match=text):
            RayExecutor(SETTINGS, **arguments)

    def test_methods_for_fixed_workers_only(self, monkeypatch):
        monkeypatch.setattr("hvd_cluster.ray.executor.check_connection", lambda: None)
        with RayExecutor(SETTINGS, min_workers=1) as executor:
            with pytest.raises(NotImplementedError, match=r"use run\(\), or num_workers alone"):
                executor.run_remote(print)
            with pytest.raises(NotImplementedError, match=r"use execute\(\), or num_workers"):
                executor.execute_single(print)
            with pytest.raises(TypeError, match="callbacks is 5, but must be a list of functions"):
                executor.run(print, callbacks=5)


class TestLog:
    def test_callbacks_get_what_a_worker_logs(self, monkeypatch):
        calls, got = [], []
        monkeypatch.setattr(logs, "_ways", {})
        with Job(1) as job:
            stop = logs.listen(job, calls.append, [got.append, lambda value: got.append(len(value))])
            environment = {"HOROVOD_RANK": "0", **job_environment(job)}
            logs.configure(environment)
            logs.log({"loss": 0.5})
            [call] = calls
            call()
            stop()
            logs.log({})
        assert got == [{"loss": 0.5}, 1]
        assert len(calls) == 1

    @pytest.mark.parametrize("is_taken_between", [False, True])
    def test_a_value_that_is_sent_again_comes_once(self, is_taken_between):
        """A client sends it again when the answer is lost with a connection."""
        calls, got = [], []
        with Job(1) as job:
            stop = logs.listen(job, calls.append, [got.append])
            for _ in range(2):
                job.store.set("logs/0/0", cloudpickle.dumps("loss"))
                if is_taken_between:
                    calls.pop()()
            for call in calls:
                call()
            stop()
        assert got == ["loss"]

    def test_a_process_that_is_no_worker_is_told_once(self, monkeypatch, caplog):
        monkeypatch.setattr(logs, "_ways", {})
        monkeypatch.setattr(logs, "_warned", set())
        with caplog.at_level(logging.WARNING):
            logs.log({})
            logs.log({})
        assert [record.message for record in caplog.records] == [
            "log() was called in a process that is not a worker of a RayExecutor; the value is dropped"
        ]


def job_environment(job):
    from executors.job.worlds import assign_ranks

    return job.environment(assign_ranks(["a"])[0])
