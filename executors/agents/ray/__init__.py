"""Workers as Ray actors in a placement group.

A job (``job``) has a group of actors (``group``, ``worker``), and each call on them is a static job
(``call_on_ranks``). In an elastic job (``elastic``) the actors come and go one by one (``actors``). A client outside of
the cluster (``client``) has a ``remote_driver`` in it. ``placement/`` says where actors may be; ``train/`` serves Ray
Train, which starts its workers itself.
"""

from typing import TYPE_CHECKING

from collectives import facade

try:
    import ray as ray
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError('RayExecutor needs Ray, which is not installed: pip install "hvd-cluster[ray]"') from error

if TYPE_CHECKING:
    from executors.agents.ray.actors import ActorWork
    from executors.agents.ray.client import ClientJob, run_elastic_by_remote_driver
    from executors.agents.ray.connection import check_connection, is_client, store
    from executors.agents.ray.elastic import ElasticOptions, run_elastic
    from executors.agents.ray.job import RayJob
    from executors.agents.ray.placement.discovery import RayHostDiscovery
    from executors.agents.ray.placement.request import RayRequest
    from executors.agents.ray.settings import ElasticRequest, MiniSettings, check_extra, check_runtime_env, save_ssh_key
    from executors.agents.ray.train.backend import JobConfig
    from executors.agents.ray.train.datasets import Sharded, get_dataset_shard, split
    from executors.agents.ray.train.last_report import BarrierGuard, Deliveries, ReportKeeper
    from executors.agents.ray.worker_log import Callback, Queue, log, send_to
else:
    __getattr__ = facade(
        __name__,
        {
            "actors": "ActorWork",
            "client": "ClientJob run_elastic_by_remote_driver",
            "connection": "check_connection is_client store",
            "elastic": "ElasticOptions run_elastic",
            "job": "RayJob",
            "worker_log": "Callback Queue log send_to",
            "placement.discovery": "RayHostDiscovery",
            "placement.request": "RayRequest",
            "settings": "ElasticRequest MiniSettings check_extra check_runtime_env save_ssh_key",
            "train.backend": "JobConfig",
            "train.datasets": "Sharded get_dataset_shard split",
            "train.last_report": "BarrierGuard Deliveries ReportKeeper",
        },
    )
