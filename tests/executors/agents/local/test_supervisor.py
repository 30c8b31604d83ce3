"""The tasks of a supervisor besides watching its workers."""

import os

from executors.agents.local.supervisor import Ended, Supervisor, WorkerStarted
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
