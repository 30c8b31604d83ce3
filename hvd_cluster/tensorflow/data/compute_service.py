"""The functions of the data service: those of the processes that compute, and those of the ranks that train."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from executors import ExecutorError
from hvd_cluster.core import basics
from hvd_cluster.data.compute import ComputeClient
from hvd_cluster.tensorflow.data import servers
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig
from hvd_cluster.tensorflow.data.reader import Reader

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

RUN = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")

logger = logging.getLogger(__name__)
_shared_jobs = itertools.count()


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Serve as one worker of the data service, and as a dispatcher where one is due, until the service ends.

    Run it on ``dispatchers * workers_per_dispatcher`` ranks, by ``hvdrun`` or :func:`hvd_cluster.spark.run`: each group
    of ``workers_per_dispatcher`` ranks has a dispatcher, which is in its first rank if ``dispatcher_side`` is
    "compute". It initializes hvd_cluster if that has not been done.

    Raises ValueError for another number of ranks, StartTimeoutError if a dispatcher does not register in time, and
    ExecutorError if the service fails, with the process that was lost.
    """
    with ExitStack() as stack:
        if not basics.is_initialized():
            basics.init()
            stack.callback(basics.shutdown)
        index, size = basics.rank(), basics.size()
        config, own = compute_config, compute_config.workers_per_dispatcher
        if size != config.dispatchers * own:
            raise ValueError(
                f"{config.dispatchers} dispatchers with {own} workers each need {config.dispatchers * own} ranks, "
                f"but there are {size}"
            )
        client = stack.enter_context(config.compute_client())
        number, position = divmod(index, own)
        if config.dispatcher_side == "compute" and position == 0:
            stack.enter_context(servers.dispatcher(client, config, number))
        target = client.wait_for_dispatcher_registration(number, config.timeout)
        stack.enter_context(servers.worker(client, config, number, index, target))
        client.wait_for_shutdown()


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of the data service for rank ``rank``, for ``tf.data.experimental.service`` inside of the block.

    With ``dispatcher_side="training"``, the ranks below ``dispatchers`` have a dispatcher each, which serves until all
    readers have left their blocks, for ``timeout`` seconds more at most. If the service fails, reading raises
    ``tf.errors.FailedPreconditionError`` with the process that was lost.

    Raises StartTimeoutError if dispatcher or workers are not there in time, ExecutorError if the service has failed or
    cannot be reached.
    """
    with ExitStack() as stack:
        number = rank % compute_config.dispatchers
        client = stack.enter_context(compute_config.compute_client())
        is_ours = compute_config.dispatcher_side == "training" and rank == number
        if is_ours:
            stack.enter_context(servers.dispatcher(client, compute_config, number))
        client.enter(number)
        stack.callback(_leave, client, compute_config, number, is_ours)
        reader = Reader(compute_config, rank)
        stack.callback(reader.close)
        yield reader.service


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: Any = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
    *,
    job_name: str | None = None,
) -> tf.data.Dataset:
    """The elements of ``dataset``, from the workers of the data service; also a method of ``tf.data.Dataset``.

    Args:
        dataset: the dataset; all that it does up to here is done by the workers.
        compute_config: the data service, whose dispatchers are on the side "compute".
        rank: the rank that reads.
        size: the number of ranks that read; needed with ``round_robin``.
        processing_mode: "distributed_epoch" for each element once, "parallel_epochs" for each element once from each
            worker, or a ``tf.data.experimental.service.ShardingPolicy``.
        reuse_dataset: whether the ranks of a dispatcher share the elements; otherwise each reads all of them.
        round_robin: whether the ranks share the elements, and take turns, so that all read the same number. The dataset
            must be infinite: call ``repeat()`` before.
        job_name: what ranks that share elements agree on. By default the n-th call that shares elements in one rank
            shares them with the n-th call in the others; ranks of an elastic job need a name of their own.

    The result has the ``element_spec`` of ``dataset``. If the service fails, reading raises
    ``tf.errors.FailedPreconditionError`` with the process that was lost.

    Raises RuntimeError if the dispatchers are on the side "training", which needs :func:`tf_data_service`; ValueError
    for ``round_robin`` without ``size``, or a ``job_name`` without sharing; StartTimeoutError and ExecutorError as
    :func:`tf_data_service`.
    """
    if compute_config.dispatcher_side != "compute":
        raise RuntimeError(
            'the dispatchers are on the side "training", where they end with a block: use tf_data_service() and '
            "tf.data.experimental.service.distribute()"
        )
    if round_robin and size is None:
        raise ValueError("round_robin=True needs size, the number of ranks that read")
    shared = reuse_dataset or round_robin
    if job_name and not shared:
        raise ValueError(f"job_name={job_name!r} is for elements that ranks share: add reuse_dataset=True")
    reader = Reader(compute_config, rank)
    try:
        result = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=reader.service,
                job_name=(job_name or _shared_job()) if shared else None,
                consumer_index=rank if round_robin else None,
                num_consumers=size if round_robin else None,
            )
        )
    except BaseException:
        reader.close()
        raise
    _close_at_the_end(reader, result)
    return result


def _leave(client: ComputeClient, config: TfDataServiceConfig, number: int, is_ours: bool) -> None:
    try:
        if not client.leave(number) and is_ours:
            client.wait_until_free(number, config.timeout)
    except ExecutorError as error:  # the block has its result, or an error of its own
        logger.warning("dispatcher %d may have been left too early: %s", number, error)


def _shared_job() -> str:
    """A name that the ranks of one run have in common, and no other run has."""
    run = [os.environ[name] for name in RUN if name in os.environ]
    return "-".join(["job", *run, str(next(_shared_jobs))])


def _close_at_the_end(reader: Reader, dataset: tf.data.Dataset) -> None:
    """Close ``reader`` when the dataset is garbage; a graph keeps only the address, so for its sake at exit only."""
    if tf.executing_eagerly():
        weakref.finalize(dataset, reader.close)
    else:
        atexit.register(reader.close)


tf.data.Dataset.send_to_data_service = send_to_data_service
