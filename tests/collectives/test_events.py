"""The stream of events."""

import logging
import threading

from collectives.events import EVERY_KIND, EventStream, Finished, Sent

EVENT = Finished(7, ("a",), 0, 1.0)


def test_nobody_listens_at_first():
    stream = EventStream()
    assert not stream.wanted
    stream.publish(EVENT)


def test_everybody_hears_every_event_in_order():
    stream, heard = EventStream(), []
    for listener in "ab":
        stream.subscribe(lambda event, listener=listener: heard.append((listener, event.time)))
    assert stream.wanted
    for time in (1.0, 2.0):
        stream.publish(Finished(7, ("a",), 0, time))
    assert heard == [("a", 1.0), ("b", 1.0), ("a", 2.0), ("b", 2.0)]


def test_a_subscriber_hears_the_kinds_that_it_wants():
    stream, some, all_kinds = EventStream(), [], []
    end = stream.subscribe(some.append, [Sent])
    assert stream.wanted == {Sent}
    stream.subscribe(all_kinds.append)
    assert stream.wanted == EVERY_KIND
    sent = Sent("Ready", (1,), 3, 1.0)
    for event in (EVENT, sent):
        stream.publish(event)
    assert (some, all_kinds) == ([sent], [EVENT, sent])
    end()
    assert stream.wanted == EVERY_KIND


def test_a_subscription_ends_any_number_of_times():
    stream, heard = EventStream(), []
    end = stream.subscribe(heard.append)
    stay = stream.subscribe(lambda event: None)
    end(), end()
    stream.publish(EVENT)
    assert not heard
    assert stream.wanted
    stay()
    assert not stream.wanted


def test_who_raises_is_logged_and_removed_and_harms_nobody(caplog):
    def clumsy(event):
        heard.append("clumsy")
        raise KeyError("oops")

    stream, heard = EventStream(), []
    stream.subscribe(clumsy)
    stream.subscribe(lambda event: heard.append("other"))
    with caplog.at_level(logging.ERROR, "collectives.events"):
        stream.publish(EVENT), stream.publish(EVENT)
    assert heard == ["clumsy", "other", "other"]
    assert "clumsy" in caplog.text
    assert "oops" in caplog.text


def test_who_raises_on_two_threads_at_once_is_logged_once(caplog):
    def clumsy(event):
        meeting.wait(20.0)
        raise KeyError("oops")

    stream, meeting = EventStream(), threading.Barrier(2)
    stream.subscribe(clumsy)
    threads = [threading.Thread(target=stream.publish, args=(EVENT,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert not stream.wanted
    assert caplog.text.count("is removed") == 1


def test_a_subscriber_may_end_itself():
    stream, heard = EventStream(), []
    end = stream.subscribe(lambda event: (heard.append(event), end()))
    stream.publish(EVENT), stream.publish(EVENT)
    assert heard == [EVENT]
