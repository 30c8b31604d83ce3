"""One elastic job on Ray for tests: it runs in a thread, so that the test may change the cluster meanwhile."""

import os
import threading
import time
from pathlib import Path

from hvd_cluster.core import basics
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ray import RayExecutor, log

PATIENCE_SECONDS = 120.0
STEP_SECONDS = 0.005
ARGUMENTS = {"cooldown_range": (1, 1), "elastic_timeout": 120}


def train(folder, fails=""):
    """Steps until ``folder/end`` exists; says at the begin of each world who and where it is.

    ``seen`` counts whole steps, each of which all ranks make together. A worker waits in the middle of a step while
    ``folder/hold.<its name>`` exists.
    """
    import ray
    import torch  # noqa: F401  ranks on several nodes need it; a newcomer shall have it before it is ready

    worker, node = os.environ["HOROVOD_WORKER_ID"], ray.get_runtime_context().get_node_id()
    basics.init()

    @run
    def go(state):
        log({"worker": worker, "node": node, "rank": basics.rank(), "size": basics.size(), "pid": os.getpid()})
        is_over = False
        while not is_over:
            time.sleep(STEP_SECONDS)
            if fails == worker and state.step == 3:
                raise ValueError(f"bad batch of {worker}")
            while (Path(folder) / f"hold.{worker}").exists():
                time.sleep(STEP_SECONDS)
            parts = allgather_object((state.step, (Path(folder) / "end").exists()), "parts")
            assert len({step for step, _ in parts}) == 1, parts
            state.step += 1
            state.seen += sum(1 / len(parts) for _ in parts)
            is_over = any(ends for _, ends in parts)
            state.commit()

    state = ObjectState(step=0, seen=0.0)
    go(state)
    return worker, basics.rank(), state.step - round(state.seen)


class ElasticRun:
    """``train`` on an elastic executor; ``worlds`` has what the workers logged, in the order of its arrival."""

    def __init__(self, folder, fails="", **arguments):
        self.folder = folder
        self.worlds = []
        self._result = self._error = None
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), **{**ARGUMENTS, **arguments})
        # Ends with the job, which close() ends at the latest.
        self._thread = threading.Thread(target=self._run, args=(executor, fails), name="hvd-test-job")
        self._thread.start()

    def _run(self, executor, fails):
        try:
            with executor:
                self._result = executor.run(train, [str(self.folder), fails], callbacks=[self.worlds.append])
        except BaseException as error:  # noqa: BLE001  the test gets it
            self._error = error

    def until(self, condition, what):
        """Wait until ``condition()``; fail with what is known if it does not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self._thread.is_alive(), f"the job ended before {what}: {self._error!r} {self._result}"
            assert time.monotonic() < deadline, f"not {what}: {self.worlds}"
            time.sleep(0.01)

    def world(self, size, without=()):
        """The ranks of the newest world of ``size`` ranks, once all of them have said that they are in it.

        ``without`` names workers that must not be among them.
        """
        self.until(lambda: self._complete(size, without), f"in a world of {size} ranks")
        return self._complete(size, without)

    def _complete(self, size, without):
        newest = {}
        for entry in self.worlds:
            newest[entry["worker"]] = entry
        found = [each for worker, each in newest.items() if each["size"] == size and worker not in without]
        found.sort(key=lambda each: each["rank"])
        return found if [each["rank"] for each in found] == list(range(size)) else []

    def end(self):
        """Let the training end; its values."""
        (self.folder / "end").touch()
        return self.result()

    def result(self):
        """The values of the job, or its error."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result

    def close(self):
        (self.folder / "end").touch()
        self._thread.join(PATIENCE_SECONDS)
