"""What the live page shows."""

from dataclasses import replace

import msgpack
import pytest

from collectives.engine.counters import SetCounts
from collectives.observe.live.snapshot import Recording, Slow, Snapshot, Stall
from collectives.observe.metrics.values import Metrics
from collectives.stalls.stragglers import Cause, Straggler
from executors.dashboard.picture import KEPT_LINES, Address, Picture
from executors.job.worlds import Published


def snapshot(time=0.0, rank=0, size=2, **more):
    return Snapshot(time, rank, size, 0, "h", 100 + rank, **more)


def test_a_snapshot_survives_the_way():
    numbers = {"samples": 7, "steps": 5, "batch": 3}
    sent = snapshot(slow=(Slow(1, 0.5, "late"),), stalls=(Stall("t", (1, 2), 60.0, 3.0, 4),), recording="x", **numbers)
    assert Snapshot.decode(sent.encode()) == sent


def test_a_stall_of_a_rank_of_an_older_version_has_no_process_set():
    sent = msgpack.packb({**msgpack.unpackb(snapshot().encode()), "stalls": [("t", (1,), 60.0, 3.0)]})
    assert Snapshot.decode(sent).stalls == (Stall("t", (1,), 60.0, 3.0),)


def test_a_request_to_record_survives_the_way():
    assert Recording.decode(Recording(3, "f", 10.0).encode()) == Recording(3, "f", 10.0)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x80", b"\xc1", b"\x81\xa4rank\x01"])
def test_what_is_no_snapshot_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        Snapshot.decode(data)


def test_a_snapshot_adds_up_the_process_sets():
    sets = {0: SetCounts(batches=2, bytes=10, late_seconds=1.0), 1: SetCounts(batches=3, inside_seconds=0.5)}
    slow = Straggler(1, 0, Cause.LATE, 0.05, 0.4)
    made = Snapshot.of(Metrics(0, 2, 3, 1, 4, 0, 0, sets, (slow,), 9, 6, 8), 5.0, "h", 1)
    assert (made.batches, made.nbytes, made.waiting, made.samples, made.lost_steps, made.steps) == (5, 10, 1.5, 9, 4, 6)
    assert made.slow == (Slow(1, 0.4, Cause.LATE.value),)
    assert made.batch == 8


@pytest.mark.parametrize(("waiting", "shown"), [(0.3, 1.0), (7.0, 8.0)])
def test_a_snapshot_counts_a_wait_that_goes_on_for_long(waiting, shown):
    sets = {0: SetCounts(batches=2, late_seconds=1.0)}
    metrics = Metrics(0, 2, 3, 1, 4, 0, 0, sets, waiting=waiting)
    assert Snapshot.of(metrics, 5.0, "h", 1).waiting == shown


def test_rates_are_those_of_the_last_seconds():
    picture = Picture("job", 2)
    for second in range(20):
        grown = second * 10 if second > 10 else 0
        for rank in (0, 1):
            numbers = {"batches": grown, "steps": grown // 2, "samples": 2 * grown, "nbytes": grown}
            numbers["waiting"] = second / 4
            picture.hear(f"worker-{rank}", snapshot(100 * rank + second, rank, **numbers), second)
    shown = picture.as_dict(19.0)
    assert shown["batches_per_second"] == shown["bytes_per_second"] == 10
    assert shown["samples_per_second"] == 40, "of all ranks"
    assert shown["steps_per_second"] == 5
    assert [each["waiting_share"] for each in shown["ranks"]] == [0.25, 0.25]


def test_numbers_of_another_process_are_no_rate():
    picture = Picture("job", 1)
    picture.hear("worker-0", snapshot(0.0, 0, 1, batches=100), 0.0)
    picture.hear("worker-0", Snapshot(50.0, 0, 1, 0, "h", 555, batches=1), 1.0)
    assert picture.as_dict(1.0)["batches_per_second"] == 0


def test_the_last_batch_of_a_silent_rank_is_shown():
    picture = Picture("job", 3)
    picture.hear("worker-0", snapshot(batch=12), 0.0)
    picture.hear("worker-1", snapshot(rank=1), 0.0)
    assert [each["batch"] for each in picture.as_dict(60.0)["ranks"]] == [12, None, None]


def test_ranks_that_say_nothing():
    picture = Picture("job", 2)
    picture.hear("worker-0", snapshot(), 0.0)
    assert [each["state"] for each in picture.as_dict(3.0)["ranks"]] == ["runs", "has not called init() yet"]
    assert picture.as_dict(7.0)["ranks"][0]["state"] == "silent for 7 s"


def test_a_silent_rank_has_no_speed():
    """Its last numbers would hide that nothing moves."""
    picture = Picture("job", 1)
    for time in (0.0, 1.0):
        picture.hear("worker-0", replace(snapshot(), time=time, batches=int(10 * time)), time)
    assert picture.as_dict(1.0)["batches_per_second"] == 10.0
    shown = picture.as_dict(9.0)
    assert (shown["batches_per_second"], shown["ranks"][0]["batches_per_second"]) == (0.0, 0.0)


def test_stragglers_and_stalls_are_those_that_rank_0_knows():
    picture = Picture("job", 2)
    stall = Stall("gradient", (1,), 60.0, 2.0)
    picture.hear("worker-0", snapshot(slow=(Slow(1, 0.5, "late"),), stalls=(stall,)), 0.0)
    shown = picture.as_dict(0.0)
    assert [each["slow"] for each in shown["ranks"]] == ["", "the others wait for it for 50% of their time (late)"]
    assert shown["stalls"] == [{"name": "gradient", "process_set": 0, "missing": [1], "seconds": 62.0}]


def test_worlds_of_an_elastic_job():
    picture = Picture("job", 2)
    picture.publish(Published(0, (("worker-0", "a"), ("worker-1", "b")), text="worker-0 joined"), 0.0)
    picture.publish(Published(1, (("worker-1", "b"), ("worker-2", "b")), text="rank 0 on host a lost"), 5.0)
    for number in range(4):
        picture.hear(f"worker-{number}", snapshot(rank=number), 7.0)
    shown = picture.as_dict(8.0)
    assert [(each["rank"], each["worker"], each["host"]) for each in shown["ranks"]] == [
        (0, "worker-1", "b"),
        (1, "worker-2", "b"),
    ]
    assert [(each["number"], each["text"], each["ago"]) for each in shown["rounds"]] == [
        (1, "rank 0 on host a lost", 3.0),
        (0, "the start", 8.0),
    ]
    assert shown["newcomers"] == ["worker-0", "worker-3"]
    assert shown["round"] == 1


def test_workers_that_a_world_lost_are_forgotten_after_the_next_change():
    picture = Picture("job", 2)
    for number in range(50):
        for worker in (f"worker-{number}", f"worker-{number + 1}"):
            picture.write(worker, "stdout", "begins")
            picture.hear(worker, snapshot(), float(number))
        picture.publish(Published(number, ((f"worker-{number}", "a"), (f"worker-{number + 1}", "a"))), float(number))
        if number:
            picture.write(f"worker-{number - 1}", "stderr", "ends")
    assert sorted(picture.lines) == ["worker-48", "worker-49", "worker-50"]
    assert sorted(picture.workers) == ["worker-48", "worker-49", "worker-50"]


def test_a_worker_that_comes_back_keeps_its_lines():
    picture = Picture("job", 2)
    picture.write("worker-1", "stdout", "begins")
    for number, workers in enumerate((("worker-0", "worker-1"), ("worker-0",), ("worker-0", "worker-1"))):
        picture.publish(Published(number, tuple((worker, "a") for worker in workers)), 0.0)
    assert "worker-1" in picture.lines


def test_a_reason_that_is_known_later():
    picture = Picture("job", 2)
    for number in range(2):
        picture.publish(Published(number, (("worker-0", "a"),), text="rank 1 lost (ended)"), 0.0)
    picture.tell(1, "world 1: 1 rank, rank 1 lost (killed by signal 9), resumed after 0.05 s, 0 steps lost")
    assert [each["text"] for each in picture.as_dict(0.0)["rounds"]] == [
        "rank 1 lost (killed by signal 9), resumed after 0.05 s, 0 steps lost",
        "the start",
    ]


def test_the_end_of_an_elastic_job():
    picture = Picture("job", 1)
    picture.publish(Published(1, text="too few", is_over=True), 0.0)
    picture.end("later")
    assert picture.as_dict(0.0)["over"] == "too few"


def test_lines_are_the_last_ones_and_not_long():
    picture = Picture("job", 1)
    for number in range(KEPT_LINES + 5):
        picture.write("worker-0", "stdout", f"{number} " + "x" * 1000)
    lines = picture.as_dict(0.0)["ranks"][0]["lines"]
    assert len(lines) == KEPT_LINES
    assert lines[-1][1].startswith(f"{KEPT_LINES + 4} ")
    assert len(lines[-1][1]) == 500


def test_colours_of_a_terminal_are_dropped():
    picture = Picture("job", 1)
    picture.write("worker-0", "stderr", "\x1b[1;31mred\x1b[0m [1] \x1b[2K.")
    assert picture.as_dict(0.0)["ranks"][0]["lines"] == [["stderr", "red [1] ."]]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (False, None),
        (None, None),
        (True, Address("127.0.0.1", 0)),
        ("0.0.0.0:8265", Address("0.0.0.0", 8265)),
        ("[::1]:0", Address("::1", 0)),
    ],
)
def test_addresses(given, address):
    assert Address.of(given) == address


@pytest.mark.parametrize("given", ["8265", "host:", ":80", "host:65536", "a b:1", "", 8265, "h:-1"])
def test_what_is_no_address(given):
    with pytest.raises(ValueError, match=r"dashboard is .*, but must be True or an address and a port"):
        Address.of(given)
