"""The cluster of a campaign on Ray: ``ray_nodes CPUS FOLDER``.

It has a head without CPUs, and two nodes with CPUS together, and writes its address to ``FOLDER/address`` and the
process of the second node to ``FOLDER/second``. Lines of the standard input are orders: ``drain`` (Ray is told that the
second node will go), ``restore`` (another node comes for it) and ``used``, which prints a list in JSON: what jobs still
use. It ends with its input.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

from ray._private.state import GlobalState
from ray._raylet import GcsClient
from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.cluster_utils import Cluster

from tests.faults.events import NODE_SECONDS

STORE_BYTES = 80 << 20
# Ray says after 2 seconds, instead of after 12, that a node died.
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 2}
PREEMPTION = 2  # a reason that Ray never rejects
NODES = 3


class Nodes:
    """The cluster, whose files are in ``folder``."""

    def __init__(self, cpus, folder):
        self._folder = folder
        self._cpus = cpus - cpus // 2
        (folder / "ray").mkdir()  # Ray notes the address of the cluster there
        self._cluster = Cluster()
        self._add(0, include_dashboard=False, _system_config=HEALTH)
        self._add(cpus // 2)
        self._second = self._begin_second()
        self._client = GcsClient(address=self._cluster.gcs_address)
        (folder / "next").write_text(self._cluster.address)
        (folder / "next").rename(folder / "address")

    def _add(self, cpus, **options):
        return self._cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE_BYTES, temp_dir=str(self._folder), **options
        )

    def _begin_second(self):
        node = self._add(self._cpus)
        (self._folder / "second").write_text(str(node.all_processes["raylet"][0].process.pid))
        return node

    def obey(self, order):
        {"drain": self._drain, "restore": self._restore, "used": self._tell}[order]()

    def _drain(self):
        deadline = int((time.time() + NODE_SECONDS) * 1000)
        accepted, reason = self._client.drain_node(self._second.node_id, PREEMPTION, "the campaign wants it", deadline)
        assert accepted, reason

    def _restore(self):
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = self._begin_second()

    def _tell(self):
        print(json.dumps(self._used()), file=sys.__stdout__, flush=True)

    def _used(self):
        state = self._cluster.global_state
        return [*_of_jobs(state), *_of_nodes(state), *self._of_autoscaler()]

    def _of_autoscaler(self):
        """A job that has gone waits for no node."""
        wanted = self._client.internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL, None)
        return [f"a request to the autoscaler: {wanted.decode()}"] if json.loads(wanted or b"[]") else []

    def close(self):
        self._cluster.shutdown()


def _of_jobs(state: GlobalState):
    actors = [each for each in state.actor_table(None).values() if each["State"] != "DEAD"]
    groups = [each for each in state.placement_group_table().values() if each["state"] != "REMOVED"]
    return [f"actor {each}" for each in actors] + [f"placement group {each}" for each in groups]


def _of_nodes(state: GlobalState):
    alive = [each for each in state.node_table() if each["Alive"]]
    free = sum(each.get("CPU", 0.0) for each in state.available_resources_per_node().values())
    used = sum(each["Resources"].get("CPU", 0.0) for each in alive) - free
    lost = [f"{NODES - len(alive)} nodes fewer"] if len(alive) != NODES else []
    return lost + ([f"{used:g} CPUs"] if used else [])


def main():
    cpus, folder = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        nodes = Nodes(int(cpus), Path(folder))
        try:
            for line in sys.stdin:
                nodes.obey(line.strip())
        finally:
            nodes.close()


if __name__ == "__main__":
    main()
