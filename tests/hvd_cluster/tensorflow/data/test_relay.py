"""The relay between TensorFlow and a dispatcher, with a client and a server of grpc in their places."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import pytest

from hvd_cluster.tensorflow.data.reader import UNLIMITED, DispatcherRelay

pytestmark = pytest.mark.leaves("descriptors")  # grpc keeps some
METHOD = "/tensorflow.data.DispatcherService/GetWorkers"
SECONDS = 60


class Dispatcher(grpc.GenericRpcHandler):
    def service(self, handler_call_details):
        def answer(request, context):
            if request == b"bad":
                context.abort(grpc.StatusCode.NOT_FOUND, "no such dataset")
            return handler_call_details.method.encode() + request

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def dispatcher():
    """The address of a dispatcher."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, (Dispatcher(),), options=UNLIMITED)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(SECONDS)


@contextmanager
def asking(address, timeout=SECONDS):
    """The relay of the dispatcher at ``address``, and a function that sends it a request."""
    relay = DispatcherRelay(address, f"dispatcher 3 at {address}", timeout)
    with closing(relay), grpc.insecure_channel(relay.address, UNLIMITED) as channel:
        yield relay, lambda request: channel.unary_unary(METHOD)(request, timeout=SECONDS)
    relay.close()


def failure_of(ask):
    with pytest.raises(grpc.RpcError) as caught:
        ask(b"")
    return caught.value.code(), caught.value.details()


def test_requests_and_answers_pass():
    with dispatcher() as address, asking(address) as (_, ask):
        assert ask(b"\x00" * (5 << 20)) == METHOD.encode() + b"\x00" * (5 << 20)
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"bad")
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such dataset")


def test_the_first_failure_is_the_answer_to_everything():
    with dispatcher() as address, asking(address) as (relay, ask):
        relay.fail("worker 1 has died")
        relay.fail("worker 2 has died")
        assert failure_of(ask) == (grpc.StatusCode.FAILED_PRECONDITION, "worker 1 has died")


def test_a_dispatcher_that_comes_back_in_time_is_no_failure():
    """TensorFlow repeats a request that finds nobody."""
    with dispatcher() as address:
        pass
    with asking(address) as (_, ask):
        assert failure_of(ask)[0] == grpc.StatusCode.UNAVAILABLE


def test_a_dispatcher_that_is_not_there():
    with dispatcher() as address:
        pass
    with asking(address, timeout=0.1) as (_, ask):
        code, text = failure_of(ask)
        while code != grpc.StatusCode.FAILED_PRECONDITION:
            assert code == grpc.StatusCode.UNAVAILABLE
            code, text = failure_of(ask)
        assert text == f"dispatcher 3 at {address} has not answered for 0.1 s"
