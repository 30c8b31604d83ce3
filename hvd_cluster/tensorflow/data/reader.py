"""A process that reads from the data service: it hears of the end of the service, and so does its TensorFlow.

TensorFlow repeats a request that finds nobody, and so hides every loss: that of a dispatcher as a wait, and that of a
worker, whose elements are gone, as the end of the data. An answer with an error of another kind it raises in the next
step of the training. So the relay passes requests on, which are few and small, and answers them with the reason itself
once the service has failed. Elements do not pass here: they come from the workers.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from collectives import ShutDownError
from executors import ExecutorError
from hvd_cluster.tensorflow.data.config import TfDataServiceConfig

THREADS = 4
STOP_SECONDS = 5.0
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# Datasets are part of requests.
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class DispatcherRelay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves on a port of the loopback interface for the dispatcher at ``address``, ``host:port``, until :meth:`close`.

    A dispatcher that answers nothing for ``timeout`` seconds is an error, which calls it ``name``. Owns the threads
    "hvd-data-relay", which serve, and those of grpc.
    """

    def __init__(self, address: str, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._reason = ""
        self._silent_since: float | None = None
        self._channel = grpc.insecure_channel(address, UNLIMITED)
        # Bound of a request: timeout; abort: the channel is closed.
        self._threads = ThreadPoolExecutor(THREADS, "hvd-data-relay")
        self._server = grpc.server(self._threads, (self,), options=[*UNLIMITED, ("grpc.so_reuseport", 0)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def fail(self, reason: str) -> None:
        """Answer all requests from now on with an error that gives ``reason``."""
        self._reason = self._reason or reason

    def close(self) -> None:
        """Close the port. Any number of times, from any thread."""
        self._channel.close()
        self._server.stop(None).wait(STOP_SECONDS)
        self._threads.shutdown(wait=False)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a request, for grpc."""

        def answer(request: bytes, context: Any) -> bytes:
            return self._answer(handler_call_details.method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    def _answer(self, method: str, request: bytes, context: Any) -> bytes:
        if self._reason:
            self._refuse(context)
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=self._timeout)
        except grpc.RpcError as error:
            self._note(error.code())
            if self._reason:
                self._refuse(context)
            context.abort(error.code(), error.details())
        except ValueError:  # the channel is closed
            context.abort(grpc.StatusCode.CANCELLED, "this process does not read from the data service any more")
        self._silent_since = None
        return answer

    def _note(self, code: grpc.StatusCode) -> None:
        now = time.monotonic()
        if code not in SILENT:
            self._silent_since = None
            return
        self._silent_since = self._silent_since or now
        if now - self._silent_since >= self._timeout or code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.fail(f"{self._name} has not answered for {self._timeout:g} s")

    def _refuse(self, context: Any) -> NoReturn:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._reason)
        raise AssertionError("abort() raises")


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
        self._relay = DispatcherRelay(address, f"dispatcher {dispatcher} at {address}", config.timeout)
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
