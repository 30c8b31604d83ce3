"""The training that the tests of whole jobs run: ``training.py FOLDER [TEXT]``, without a framework.

Each worker appends to ``FOLDER/<worker>`` what happens to it. It trains until ``FOLDER/end`` exists; ``FOLDER/<what>``
with the number of a worker lets that worker do ``what`` once.
"""

import os
import sys
import threading
import time
from pathlib import Path

from hvd_cluster.core import basics
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.ops.objects import allgather_object

STEP_SECONDS = 0.005


class Training:
    """One worker."""

    def __init__(self, folder):
        self.folder = folder
        self.worker = os.environ.get("HOROVOD_WORKER_ID", "worker-0")
        self.set = None
        self.note(f"pid {os.getpid()}")

    def note(self, text):
        with (self.folder / self.worker).open("a") as file:
            file.write(f"{text}\n")

    def wanted(self, what):
        """Whether the test wants this worker to do ``what``."""
        path = self.folder / what
        return path.exists() and path.read_text() == self.worker

    def warm_up(self, state):
        self.note("warm-up")
        allgather_object(state.step, "warm-up")

    def train(self, state):
        """Steps in which each rank contributes one part of the size; ``seen`` counts whole steps."""
        self.note(f"world {basics.rank()} of {basics.size()}")
        if self.set is not None and self.set.included():
            self.note(f"set {allgather_object(basics.rank(), process_set=self.set)} of {basics.size()}")
        is_over = False
        while not is_over:
            time.sleep(STEP_SECONDS)
            parts = allgather_object((state.step, (self.folder / "end").exists()), "parts")
            assert len({step for step, _ in parts}) == 1, parts
            state.step += 1
            state.seen += sum(1 / len(parts) for _ in parts)
            is_over = any(ends for _, ends in parts)
            self.note(f"step {state.step} {basics.size()}")
            if self.wanted("raise"):
                raise ValueError("bad batch")
            if self.wanted("crash"):
                sys.excepthook = lambda *error: sys.stderr.write("crashed\n")
                raise ValueError("bad batch")
            if self.wanted("leave"):
                return
            if self.wanted("drain"):
                (self.folder / "drain").unlink()
                drain()
            state.commit()


def main():
    training = Training(Path(sys.argv[1]))
    while training.wanted("hold"):
        time.sleep(STEP_SECONDS)
    if training.wanted("fail"):
        raise ImportError("no such module")
    basics.init()
    training.note("init")
    if "sets" in sys.argv:
        training.set = basics.add_process_set([0, 1])
    state = ObjectState(step=0, seen=0.0, **({"other": 1} if training.wanted("differ") else {}))

    if "twice" in sys.argv:
        run(training.warm_up)(state)
        training.note("between")
    while (training.folder / "pause").exists():
        time.sleep(STEP_SECONDS)
    run(training.train)(state)
    training.note(f"result {state.step} {round(state.seen)} {basics.rank()} {basics.size()}")
    while training.wanted("linger"):
        time.sleep(STEP_SECONDS)
    assert threading.active_count() > 0


if __name__ == "__main__":
    main()
