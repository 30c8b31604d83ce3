"""When a rank asks the coordinator, and what it makes of no answer."""

from collectives.api import Topology
from collectives.controller.waits import ProcessState
from collectives.stalls.inspector import StallInspector
from collectives.stalls.watchdog import Verdict, Watchdog, explain

NOTHING, ASK = Verdict(), Verdict(ask=True)


class Flight:
    """The time at which the oldest tensor in flight was submitted."""

    since = 100.0

    def __call__(self):
        return self.since


def looks(silence, *times):
    return [silence.look(now) for now in times]


def test_it_asks_once_when_a_tensor_has_waited_for_the_time_of_a_report():
    silence = Watchdog(StallInspector(60.0), Flight())
    assert looks(silence, 100.0, 159.9, 160.0, 165.9) == [NOTHING, NOTHING, ASK, NOTHING]


def test_silence_is_reported_in_intervals():
    silence = Watchdog(StallInspector(60.0), Flight())
    assert looks(silence, 100.0, 160.0) == [NOTHING, ASK]
    assert looks(silence, 166.0, 200.0, 226.0) == [Verdict(seconds=6.0), NOTHING, Verdict(seconds=66.0)]


def test_after_the_shutdown_time_silence_is_fatal():
    silence = Watchdog(StallInspector(60.0, 90.0), Flight())
    looks(silence, 100.0, 160.0)
    assert looks(silence, 166.0, 189.9, 190.0) == [Verdict(seconds=6.0), NOTHING, Verdict(seconds=30.0, fatal=True)]


def test_an_answer_is_no_reason_to_end_but_the_next_may_not_come():
    silence = Watchdog(StallInspector(60.0, 90.0), Flight())
    looks(silence, 100.0, 160.0)
    silence.answered(160.1)
    assert looks(silence, 189.9, 190.0, 195.9) == [NOTHING, ASK, NOTHING]
    assert looks(silence, 196.0) == [Verdict(seconds=6.0, fatal=True)]


def test_a_coordinator_that_always_answers_is_asked_once_in_an_interval():
    """Such as one whose ranks wait in a join, which takes as long as it takes."""
    silence, asked = Watchdog(StallInspector(60.0, 90.0), Flight()), []
    for now in range(100, 500):
        if silence.look(float(now)).ask:
            asked.append(now)
            silence.answered(float(now))
    assert asked == [160, 190, 250, 310, 370, 430, 490]


def test_a_tensor_that_is_submitted_later_waits_for_its_own_time():
    flight = Flight()
    silence = Watchdog(StallInspector(60.0), flight)
    looks(silence, 100.0)
    flight.since = 150.0
    assert looks(silence, 160.0, 209.0, 210.0) == [NOTHING, NOTHING, ASK]


def test_without_anything_in_flight_nothing_is_planned():
    flight = Flight()
    silence = Watchdog(StallInspector(60.0), flight)
    looks(silence, 100.0)
    flight.since = None
    assert looks(silence, 160.0) == [NOTHING]
    assert silence.deadline is None


def test_without_a_stall_check_there_is_none():
    silence = Watchdog(None, Flight())
    assert looks(silence, 1e9) == [NOTHING]
    assert silence.deadline is None


def test_the_report_names_the_tensors_and_rank_0():
    text = explain(Topology(3, 4, hosts=("a", "a", "b", "b")), "'x'", 6.0, {0: ProcessState(71, "T")})
    assert "rank 3 waits for 'x', and for the decision of rank 0" in text
    assert "rank 0 on host 'a': no answer for 6.0 s. Process 71 is stopped (state T)" in text
