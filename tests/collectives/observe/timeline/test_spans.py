"""Events -> records."""

import json
import random
from itertools import pairwise

import pytest

from collectives.api import MismatchError, Parameters
from collectives.events import (
    Decided,
    Failed,
    Finished,
    Heard,
    Phase,
    Received,
    Stalled,
    Started,
    Straggling,
    Submitted,
    Switched,
)
from collectives.observe.timeline import records, spans
from collectives.observe.timeline.document import FIRST_RANK_PID, Document
from collectives.observe.timeline.spans import Arrived, Spans, Step
from collectives.stalls.stragglers import Cause, Straggler
from tests.collectives.observe.timeline import trace


def submitted(name, time, operation="allreduce", process_set=0, nbytes=24):
    return Submitted(name, process_set, operation, "float32", (2, 3), nbytes, time)


def started(batch, names, time, operation="allreduce", backend="gloo", process_set=0):
    return Started(batch, tuple(names), process_set, operation, 24 * len(names), backend, 1, time)


def part(batch, name, begin, end, calls=1):
    return Phase(batch, name, begin, end, calls, (end - begin) / 2)


def whole(name, batch, begin, operation="allreduce", process_set=0):
    """The events of an operation of one tensor."""
    return [
        submitted(name, begin, operation, process_set),
        Heard(name, process_set, (0,), False, begin + 1),
        Heard(name, process_set, (1,), False, begin + 2),
        Decided(batch, (name,), process_set, begin + 3),
        started(batch, [name], begin + 4, operation, process_set=process_set),
        part(batch, "copy in", begin + 4.1, begin + 4.2),
        part(batch, "exchange between hosts", begin + 4.2, begin + 4.3),
        Finished(batch, (name,), process_set, begin + 5),
    ]


@pytest.fixture
def traced(tmp_path):
    """A function: the valid trace of ``events`` on a rank."""

    def run(events, rank=0, close=None, **options):
        made = Spans(rank, **options)
        for event in events:
            made.add(event)
        if close is not None:
            made.close(close)
        path = tmp_path / "trace.json"
        document = Document(str(path))
        document.write(made.take())
        document.close()
        records = trace.load(path)
        trace.check(records)
        return records

    return run


def test_a_tensor_has_the_row_and_the_spans_of_horovod(traced):
    records = traced(whole("grad", 0, 1.0))
    assert trace.story(records, "grad") == [
        "B NEGOTIATE_ALLREDUCE",
        "X 0",
        "X 1",
        "E NEGOTIATE_ALLREDUCE",
        "B ALLREDUCE",
        "B QUEUE",
        "E QUEUE",
        "B GLOO_ALLREDUCE",
        "E GLOO_ALLREDUCE",
        "E ALLREDUCE",
    ]
    (end,) = [record for record in records if record["ph"] == "E" and record.get("name") == "ALLREDUCE"]
    assert end["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    assert end["ts"] == 6e6
    assert records[0]["args"]["start_time_since_epoch_in_micros"] > 0


def test_the_row_of_the_rank_has_batches_phases_and_bytes(traced):
    records = traced(whole("grad", 3, 1.0))
    assert trace.story(records, "rank 0", 0, "BE") == ["B GLOO_ALLREDUCE", "E"]
    (batch,) = [record for record in records if record["pid"] == FIRST_RANK_PID and record["ph"] == "B"]
    assert batch["args"] == {"batch": 3, "bytes": 24, "tensors": 1, "names": ["grad"]}
    phases = [record for record in records if record["ph"] == "X" and record["tid"] >= 100]
    assert [record["name"] for record in phases] == ["MEMCPY_IN_FUSION_BUFFER", "EXCHANGE_BETWEEN_HOSTS"]
    assert [record["dur"] for record in phases] == [100000.0] * 2
    assert [record["args"] for record in phases] == [{"batch": 3, "calls": 1, "milliseconds": 50.0}] * 2
    counted = [record["args"]["bytes"] for record in records if record["ph"] == "C"]
    assert (counted[0], max(counted), counted[-1]) == (24, 24, 0)


def test_an_arrow_leads_from_the_submission_to_the_batch(traced):
    records = traced(whole("grad", 0, 1.0))
    begin, end = (next(record for record in records if record["ph"] == phase) for phase in "sf")
    assert begin["id"] == end["id"]
    assert (begin["pid"], begin["ts"]) == (trace.rows(records)["grad"], 1e6)
    assert (end["pid"], end["tid"], end["ts"], end["bp"]) == (FIRST_RANK_PID, 0, 5e6, "e")


def test_tensors_of_a_batch_share_it(traced):
    events = [submitted("a", 1.0), submitted("b", 1.5), Decided(0, ("a", "b"), 0, 2.0), started(0, "ab", 3.0)]
    records = traced([*events, Finished(0, ("a", "b"), 0, 4.0)])
    assert trace.story(records, "rank 0", 0, "BE") == ["B GLOO_ALLREDUCE", "E"]
    assert len([record for record in records if record["ph"] == "f"]) == 2
    assert trace.story(records, "a") == trace.story(records, "b")


@pytest.mark.parametrize(
    ("operation", "name", "activity"),
    [
        ("broadcast", "BROADCAST", "GLOO_BCAST"),
        ("allgather", "ALLGATHER", "GLOO_ALLGATHER"),
        ("alltoall", "ALLTOALL", "GLOO_ALLTOALL"),
        ("reducescatter", "REDUCESCATTER", "GLOO_REDUCESCATTER"),
        ("barrier", "BARRIER", "GLOO_BARRIER"),
    ],
)
def test_the_names_of_operations(traced, operation, name, activity):
    told = trace.story(traced(whole("x", 0, 1.0, operation)), "x", phases="B")
    assert told == [f"B NEGOTIATE_{name}", f"B {name}", "B QUEUE", f"B {activity}"]


@pytest.mark.parametrize("operation", ["join", "add process set", "remove process set"])
def test_what_runs_on_no_backend_is_over_when_it_is_decided(traced, operation):
    name = operation.upper().replace(" ", "_")
    records = traced([submitted("x", 1.0, operation, nbytes=0), Decided(0, ("x",), 0, 2.0)])
    assert trace.story(records, "x") == [f"B NEGOTIATE_{name}", f"E NEGOTIATE_{name}"]


def test_a_tensor_of_another_process_set_has_a_row_of_its_own(traced):
    records = traced([*whole("x", 0, 1.0), *whole("x", 1, 9.0, process_set=2)])
    assert trace.story(records, "x") == trace.story(records, "x (process set 2)")


def test_negotiation_begins_with_the_first_rank_that_is_heard_of(traced):
    events = [Heard("x", 0, (2, 1), False, 1.0), submitted("x", 3.0), Heard("x", 0, (0,), True, 4.0)]
    records = traced([*events, Decided(0, ("x",), 0, 5.0), started(0, "x", 5.0), Finished(0, ("x",), 0, 6.0)])
    begin = next(record for record in records if record["ph"] == "B")
    assert (begin["name"], begin["ts"]) == ("NEGOTIATE_ALLREDUCE", 1e6)
    assert trace.story(records, "x", phases="X") == ["X 2", "X 1", "X SUBMITTED", "X 0"]
    assert next(record for record in records if record["ph"] == "s")["ts"] == 3e6


def test_in_the_bypass_nothing_is_heard_and_phases_begin_before_the_batch(traced):
    events = [submitted("x", 1.0), Decided(0, ("x",), 0, 3.0), started(0, "x", 3.0, backend="shm")]
    records = traced([*events, part(0, "copy in", 2.0, 2.5), Finished(0, ("x",), 0, 4.0)])
    assert trace.story(records, "x", phases="B")[-1] == "B SHM_ALLREDUCE"


def test_a_joined_rank_runs_what_it_has_not_submitted(traced):
    events = [Heard("x", 0, (1,), False, 1.0), started(0, "x", 3.0), Finished(0, ("x",), 0, 4.0)]
    assert trace.story(traced(events), "x") == ["B ALLREDUCE", "B GLOO_ALLREDUCE", "E GLOO_ALLREDUCE", "E ALLREDUCE"]


def test_a_tensor_that_is_submitted_again_before_its_end_is_known(traced):
    first, second = whole("x", 0, 1.0), whole("x", 1, 5.5)
    early = [*first[:-1], second[0], Finished(0, ("x",), 0, 5.6), *second[1:]]
    assert trace.story(traced(early), "x") == trace.story(traced([*first, *second]), "x")


def test_a_failed_tensor_ends_with_the_reason_and_its_batch(traced):
    error = MismatchError('ranks "disagree"')
    refused = traced([submitted("x", 1.0), Failed(None, "x", 0, error, 2.0)])
    assert trace.story(refused, "x") == ["B NEGOTIATE_ALLREDUCE", "i FAILED", "E NEGOTIATE_ALLREDUCE"]
    (instant,) = [record for record in refused if record["ph"] == "i"]
    assert instant["args"] == {"error": 'MismatchError: ranks "disagree"'}
    broken = traced([*whole("x", 4, 1.0)[:-1], Failed(4, "x", 0, error, 6.0)])
    assert trace.story(broken, "rank 0", 0, "BE") == ["B GLOO_ALLREDUCE", "E"]
    (instant,) = [record for record in broken if record["ph"] == "i"]
    assert instant["args"] == {"error": 'MismatchError: ranks "disagree"', "batch": 4}, "as in the log and in the error"
    assert [record["args"]["bytes"] for record in broken if record["ph"] == "C"][-1] == 0


def test_a_stall_a_switch_and_a_cycle_are_instants(traced):
    events = [submitted("x", 1.0), Stalled("x", 0, (1,), 60.0, 61.0), Switched(0, Parameters(), 62.0)]
    events += [Decided(0, ("x",), 0, 62.0), Decided(1, ("y",), 0, 62.0), Decided(2, ("z",), 0, 63.0)]
    records = traced(events, mark_cycles=True, close=70.0)
    found = {record["name"]: record for record in records if record["ph"] == "i"}
    assert found["STALLED"]["args"] == {"missing": [1], "seconds": 60.0}
    assert found["PARAMETERS"]["args"]["fusion_threshold"] == Parameters().fusion_threshold
    assert found["CYCLE_START"]["s"] == "g"
    cycles = [record["ts"] for record in records if record.get("name") == "CYCLE_START"]
    assert cycles == pytest.approx([62e6, 63e6], rel=1e-7)
    assert not [record for record in traced(events, close=70.0) if record.get("name") == "CYCLE_START"]


def test_what_is_open_ends_with_the_timeline(traced):
    assert trace.story(traced(whole("x", 0, 1.0)[:-1], close=9.0), "x")[-1] == "E ALLREDUCE"


def test_a_timeline_may_begin_in_the_middle_of_an_operation(traced):
    for number in range(8):
        traced(whole("x", 0, 1.0)[number:] + whole("x", 1, 10.0))


def test_phases_that_overlap_are_on_lanes_of_their_own(traced):
    events = [part(0, "combine", 1.0, 3.0), part(0, "combine", 2.0, 4.0), part(0, "combine", 3.0, 5.0)]
    records = traced(events)
    names = {record["tid"]: record["args"]["name"] for record in records if record.get("name") == "thread_name"}
    assert [names[record["tid"]] for record in records if record["ph"] == "X"] == ["COMBINE", "COMBINE 2", "COMBINE"]


def test_batches_that_overlap_are_on_lanes_of_their_own(traced):
    records = traced([started(0, "a", 1.0), started(1, "b", 2.0), Finished(0, ("a",), 0, 3.0)], close=4.0)
    assert trace.story(records, "rank 0", 0, "BE") == trace.story(records, "rank 0", 1, "BE")


def test_other_kinds_of_events_are_no_records(traced):
    assert len(traced([Received("Run", 0, 9, 1.0)])) == 2


def test_a_lane_never_goes_back_when_the_clock_is_corrected(tmp_path):
    made = Spans(1, shift=10.0)
    for event in whole("x", 0, 1.0):
        made.shift -= 2.0
        made.add(event)
    document = Document(str(tmp_path / "t"))
    document.write(made.take())
    document.close()
    trace.check(trace.load(tmp_path / "t"))


def test_steps_and_phases_in_a_row_do_not_overlap_by_a_rounding(traced):
    random_numbers = random.Random(5)
    times = sorted(random_numbers.random() for _ in range(100))
    steps = tuple(Step("START", begin, end) for begin, end in pairwise(times))
    phases = [part(0, "combine", begin, end) for _, begin, end in steps]
    traced([Arrived(steps, times[0], times[-1]), *phases])


def test_any_text_is_a_name(traced):
    name = 'a"b\\c\n\x00 é \ud800'
    assert name in trace.rows(traced(whole(name, 0, 1.0)))


def test_tensors_that_are_not_in_flight_are_forgotten(monkeypatch):
    monkeypatch.setattr(spans, "MOST_LANES", 10)
    made = Spans(0)
    made.add(submitted("stays", 0.5))
    for number in range(100):
        for event in whole(f"t{number}", number, 10.0 * number + 1):
            made.add(event)
    assert len(made._lanes) <= 11
    assert (0, "stays") in made._lanes


def test_random_orders_and_losses_give_valid_traces(traced):
    """Threads publish, so events may come in another order, and some may be dropped."""
    random_numbers = random.Random(5)
    for _ in range(30):
        events = [event for number in range(6) for event in whole("xy"[number % 2], number, 6.0 * number + 1)]
        kept = random_numbers.sample(events, random_numbers.randrange(len(events)))
        kept.sort(key=lambda event: event.time + random_numbers.random() * 3)
        traced(kept, close=99.0)


def test_records_are_json(traced):
    assert json.loads(json.dumps(traced(whole("x", 0, 1.0))))


def test_many_records_of_a_row_are_several_texts(monkeypatch, traced):
    monkeypatch.setattr(records, "LARGEST", 10)
    traced([event for number in range(20) for event in whole("x", number, 9.0 * number + 1)])
    made = Spans(0)
    for number in range(20):
        for event in whole("x", number, 9.0 * number + 1):
            made.add(event)
    texts = [entry.text for entry in made.take()]
    assert len(texts) > 10
    assert max(text.count("\n") for text in texts) < 30
    assert not made.take()


def test_the_way_into_an_elastic_job_names_the_worker(traced):
    steps = (Step("START", 0.25, 0.5), Step("RENDEZVOUS", 0.5, 0.75))
    records = traced([Arrived(steps, 0.25, 0.75, "worker-7")])
    spans = [record for record in records if record["ph"] == "X"]
    assert [(span["name"], span["args"]) for span in spans] == [
        ("START", {"worker": "worker-7"}),
        ("RENDEZVOUS", {"worker": "worker-7"}),
    ]


def test_a_straggler_is_an_instant_of_all_rows(traced):
    straggler = Straggler(1, 0, Cause.LATE, 0.05, 0.8, 0.6, 0.4)
    records = traced([Straggling(straggler, False, 1.0), Straggling(straggler, True, 2.0)], close=3.0)
    found = [record for record in records if record["name"] == "STRAGGLER"]
    assert [(record["ph"], record["s"]) for record in found] == [("i", "g")] * 2
    told = {"rank": 1, "process_set": 0, "cause": "late submission", "seconds": 0.05, "share": 0.8}
    told |= {"queued": 0.6, "lacks_cores": True}
    assert [record["args"] for record in found] == [{**told, "is_over": False}, {**told, "is_over": True}]
