"""The tasks of a supervisor besides watching its workers."""

import os
import signal

from executors.agents.local.supervisor import KEPT_LINES, Ended, Supervisor, WorkerStarted
from executors.job.output import Output


def test_a_descriptor_that_can_be_read_is_acted_on_once():
    reader, writer = os.pipe()
    heard = []

    def act():
        heard.append(os.read(reader, 1))
        supervisor.end()

    with Output(1) as output, Supervisor() as supervisor:
        supervisor.listen(reader, act)
        supervisor.launch(0, ["sleep", "600"], os.environ, output)
        kinds = []
        for event in supervisor.events():
            kinds.append(type(event))
            if isinstance(event, WorkerStarted):
                os.write(writer, b"12")
    assert kinds == [WorkerStarted, Ended]
    assert heard == [b"1"]
    os.close(reader)
    os.close(writer)


def test_the_end_of_a_process_has_its_last_lines_also_one_without_an_end():
    script = f"seq 1 {KEPT_LINES + 5} >&2; printf 'no end' >&2; echo other; exit 3"
    with Output(1) as output, Supervisor() as supervisor:
        supervisor.launch(0, ["sh", "-c", script], os.environ, output)
        *_, last = supervisor.events()
    assert last == Ended(0, 3, (*map(str, range(7, KEPT_LINES + 6)), "no end"))


def test_a_notice_that_comes_with_a_second_request_to_end_is_not_lost():
    """The request interrupts nothing, though hvdrun lets SIGTERM raise."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    heard = []
    try:
        with Output(1) as output, Supervisor(5.0) as supervisor:
            supervisor.launch(0, ["sh", "-c", "trap '' TERM; exec sleep 600"], os.environ, output)
            for event in supervisor.events():
                if isinstance(event, WorkerStarted):
                    supervisor.soon(lambda: heard.append("first"))
                    supervisor.soon(lambda: os.kill(os.getpid(), signal.SIGTERM))
                    supervisor.soon(lambda: heard.append("third"))
                    supervisor.soon(lambda: supervisor.kill(0))
                    supervisor.leave()
    finally:
        assert signal.signal(signal.SIGTERM, before) is leave
    assert heard == ["first", "third"]
