"""``HvdTrainer``: training functions under Ray Train."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from executors import interface_names
from hvd_cluster import horovod
from hvd_cluster.core import basics

try:
    from ray.train import DataConfig, Result, RunConfig, ScalingConfig, ValidationConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from executors.agents.ray import Deliveries, JobConfig
    from hvd_cluster.ray.replaceable import replaceable
except ImportError as error:
    raise ImportError(
        "HvdTrainer needs Ray Train 2.60 or newer, with its dependencies; it cannot be imported "
        f'({error}): pip install "hvd-cluster[ray-train]"'
    ) from error

__all__ = ["HvdTrainer"]

NO_DATASETS = (
    "datasets are for a fixed group of workers: Ray Data has no part for a worker that replaces another one; leave "
    "elastic out, or read the data in the training function, such as by an ElasticSampler"
)


class HvdTrainer(DataParallelTrainer):
    """A trainer of Ray Train whose workers are the ranks of a job: ``hvd.init()`` in the training function finds them.

    ``train_loop_per_worker`` runs in each worker, with ``train_loop_config`` as its argument if it takes one. There
    :func:`ray.train.report`, checkpoints, ``ray.train.get_dataset_shard`` for ``datasets``, and the other functions of
    Ray Train work as they do in a ``TorchTrainer``. :meth:`fit` returns Ray Train's ``Result``; it raises
    ``ray.train.WorkerGroupError`` with the errors of all failed workers, and ``ray.train.ControllerError``.

    After a failure Ray Train ends all workers. With ``FailureConfig(max_failures=...)`` it starts new ones, which are
    a new job, and the training function begins again: it has to load ``ray.train.get_checkpoint()``. What the survivors
    had in memory is lost.

    With ``elastic``, it starts a new worker for each that failed, and the survivors keep their process: in a function
    that :func:`hvd_cluster.elastic.run` decorates, they wait for the new ones, give them their state, and go on from
    the last commit. Their ``hvd.rank()`` may change; the rank of Ray Train does not. All workers end together: one that
    has finished gives its state to a new one, and makes its last report again if Ray Train has left it out meanwhile.
    :class:`RayExecutor` with ``min_workers`` also goes on with fewer workers.

    ``nics`` are the network interfaces to use; None means any. ``import horovod`` gives hvd_cluster in the workers if
    it does here. Raises ValueError for an impossible name of an interface, for ``datasets`` with ``elastic``, and for
    what Ray Train does not accept.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        nics: Iterable[str] | str | None = None,
        elastic: bool = False,
    ) -> None:
        before = (horovod.install,) if horovod.is_requested() else ()
        if elastic and datasets:
            raise ValueError(NO_DATASETS)
        around = replaceable if elastic else _shutting_down
        if elastic:
            run_config = _with_deliveries(run_config or RunConfig())
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=JobConfig(interface_names(nics), bool(elastic), before, around),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=dataset_config,
            validation_config=validation_config,
        )

    def fit(self) -> Result:
        """Train, and return when all workers have ended and the controller is told to."""
        with _handler_kept():
            return super().fit()


def _with_deliveries(config: RunConfig) -> RunConfig:
    callbacks: list[Any] = [*(config.callbacks or ()), Deliveries()]
    return replace(config, callbacks=callbacks)


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Around a fit: Ray Train leaves a handler of Ctrl-C behind, which swallows it and keeps the controller alive."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _shutting_down() -> Iterator[None]:
    """Around the training function. A rank that fails keeps its engine: the others shall not blame a polite end."""
    yield
    basics.shutdown()
