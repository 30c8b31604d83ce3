"""A process that reads from the data service: it hears of the end of the service, and so does its TensorFlow."""

from __future__ import annotations

import threading

from collectives.api import ShutDownError
from executors.api import ExecutorError
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig
from hvd_cluster.tensorflow.data.relay import Relay

__all__ = ["Reader"]

JOIN_SECONDS = 10.0
ENDED = "the data service was shut down; read all data before that"


class Reader:
    """Reads from the dispatcher of ``rank`` by way of ``service``, an address for TensorFlow, until :meth:`close`.

    It begins when the dispatcher and all of its workers are there. Owns the daemon thread "hvd-data-reader". Raises the
    errors of a ComputeClient: StartTimeoutError, ExecutorError, SettingsError.
    """

    def __init__(self, config: TfDataServiceConfig, rank: int) -> None:
        self._client = config.compute_client()
        dispatcher = rank % config.dispatchers
        try:
            address = self._client.wait_for_dispatcher_registration(dispatcher, config.timeout)
            self._client.wait_for_dispatcher_worker_registration(dispatcher, config.timeout)
        except BaseException:
            self._client.close()
            raise
        self._relay = Relay(address, f"dispatcher {dispatcher} at {address}", config.timeout)
        self.service = f"grpc://{self._relay.address}"
        # Waits for the end of the service; close() ends that.
        self._thread = threading.Thread(target=self._watch, name="hvd-data-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Any number of times, from any thread."""
        self._client.close()
        self._relay.close()
        if self._thread is not threading.current_thread():  # whose garbage collection found a dataset
            self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        try:
            self._client.wait_for_shutdown()
        except ShutDownError:
            return
        except ExecutorError as error:
            self._relay.fail(str(error))
        else:
            self._relay.fail(ENDED)
