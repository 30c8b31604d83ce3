"""The servers of tf.data in this process. They listen on all interfaces, and TensorFlow asks for no secret there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from collectives import LOOPBACK, SettingsError
from executors import host
from hvd_cluster.data.compute import ComputeClient
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig

HEARTBEAT_MS = 1000

logger = logging.getLogger(__name__)


@contextmanager
def dispatcher(client: ComputeClient, config: TfDataServiceConfig, number: int) -> Iterator[None]:
    """Dispatcher ``number`` serves during the block."""
    service = tf.data.experimental.service
    # We find a lost worker before TensorFlow does, which would go on without its elements.
    patience = _milliseconds(4 * config.timeout)
    server = service.DispatchServer(service.DispatcherConfig(port=0, worker_timeout_ms=patience))
    try:
        address = f"{_own_address()}:{server.target.rpartition(':')[2]}"
        logger.info("dispatcher %d serves at %s, on all interfaces", number, address)
        with client.present(f"dispatcher {number} at {address}", config.timeout):
            client.register_dispatcher(number, address)
            yield
    finally:
        server.stop()


@contextmanager
def worker(
    client: ComputeClient, config: TfDataServiceConfig, dispatcher_number: int, number: int, target: str
) -> Iterator[None]:
    """Worker ``number`` serves during the block, for the dispatcher at ``target``, ``host:port``."""
    service = tf.data.experimental.service
    own = _own_address()
    name = f"worker {number} of dispatcher {dispatcher_number} on {own} (process {os.getpid()})"
    with client.present(name, config.timeout):
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=target,
                worker_address=f"{own}:%port%",
                port=0,
                heartbeat_interval_ms=HEARTBEAT_MS,
                dispatcher_timeout_ms=_milliseconds(config.timeout),
            )
        )
        try:
            client.register_worker_for_dispatcher(dispatcher_number, number)
            yield
        finally:
            server.stop()


def _own_address() -> str:
    """The address of this host for others; that of the loopback interface where there is no other."""
    try:
        return host.address_for([], os.environ)
    except SettingsError:
        return LOOPBACK


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))
