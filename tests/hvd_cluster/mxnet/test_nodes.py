"""Collectives as nodes of MXNet's engine: order, errors, and the four traps of that engine."""

import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hvd_cluster.core import basics
from tests.hvd_cluster.mxnet.pool import load

mx, hvd = load()
SECONDS = 60


def held():
    """The engine of this rank, whose communication waits: what is pushed meanwhile is in flight."""
    return basics.engine()._progress._driving.lock


def check_order():
    """Reads and writes find their order, and nobody waits in a push."""
    rank, size = hvd.rank(), hvd.size()
    tensor = mx.nd.ones((4,))
    total = mx.nd.zeros((4,))
    with held():
        for step in range(20):
            tensor *= rank + 1
            total += hvd.allreduce(tensor, op=hvd.Sum, name=f"copy.{step}")
            hvd.allreduce_(tensor, op=hvd.Max, name=f"place.{step}")
            tensor /= size
    assert (total.asnumpy() == 20 * size * (size + 1) / 2).all()
    assert (tensor.asnumpy() == 1).all()


def check_many_in_flight():
    """Without names: more than there are names for such calls, in other orders of priority on each rank."""
    rank = hvd.rank()
    results = [
        hvd.allreduce(mx.nd.full((2,), number), op=hvd.Sum, priority=number if rank else -number)
        for number in range(600)
    ]
    assert [int(each[0].asscalar()) for each in results] == [number * hvd.size() for number in range(600)]


def check_one_name():
    """Calls of one name follow each other in the order in which they were made."""
    results = [hvd.allreduce(mx.nd.full((2,), number), name="same", op=hvd.Sum) for number in range(10)]
    assert [int(each[0].asscalar()) for each in results] == [number * hvd.size() for number in range(10)]


def check_lifetime():
    """The array of a call may be a temporary one."""
    results = [hvd.allreduce(mx.nd.ones((100, 100)) * number, op=hvd.Sum) for number in range(20)]
    assert all((each.asnumpy() == number * hvd.size()).all() for number, each in enumerate(results))


def check_errors():
    """The array raises once, at the next wait; what depends on it, too; the call can be made again."""
    result = hvd.allreduce(mx.nd.ones((2 + hvd.rank(),)), name="e")
    with pytest.raises(
        mx.MXNetError, match=r"tensor 'allreduce.e': the ranks disagree about the shape: \(2,\) on rank"
    ):
        (result + 1).wait_to_read()
    place = mx.nd.ones((2 + hvd.rank(),))
    hvd.allreduce_(place, name="e")
    with pytest.raises(mx.MXNetError, match="the ranks disagree about the shape"):
        mx.nd.waitall()
    assert (hvd.allreduce(mx.nd.ones((2,)), name="e", op=hvd.Sum).asnumpy() == 2).all()
    mx.nd.waitall()


def check_arrays_with_errors():
    """Calls on them come to an end, and their names are free again; the arrays keep the errors."""
    for call in (
        lambda array: hvd.allreduce_(array, name="later"),
        lambda array: hvd.allreduce(array, name="later"),
        lambda array: hvd.grouped_allreduce([mx.nd.ones((3,)), array], name="later")[1],
        lambda array: hvd.broadcast_(array, 0, name="later"),
    ):
        failed = hvd.allreduce(mx.nd.ones((2 + hvd.rank(),)), name="e")
        with pytest.raises(mx.MXNetError, match="the ranks disagree about the shape"):
            call(failed).wait_to_read()
        with pytest.raises(mx.MXNetError, match="the ranks disagree about the shape"):
            mx.nd.waitall()
        assert (call(mx.nd.ones((2,)) * 3).asnumpy() == 3).all()


def check_fork_while_a_node_is_pending():
    """MXNet ends its threads before a fork, which wait for the lock of Python, which fork holds."""
    lock = held()
    lock.acquire()
    threading.Timer(0.3, lock.release).start()
    result = hvd.allreduce(mx.nd.ones((3,)), op=hvd.Sum)
    child = os.fork()
    if not child:
        os._exit(int(mx.nd.ones((2,)).sum().asscalar()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert (result.asnumpy() == hvd.size()).all()


def check_loader_forks():
    """As a DataLoader does, while gradients travel."""
    multiprocessing.current_process()._config["daemon"] = False  # those of a pool may have no children
    multiprocessing.set_start_method("fork", force=True)
    numbers = mx.gluon.data.ArrayDataset(np.arange(8, dtype=np.float32))
    for batch in mx.gluon.data.DataLoader(numbers, 4, num_workers=2):
        hvd.allreduce_(batch, op=hvd.Sum)
        assert batch.shape == (4,)
    mx.nd.waitall()


def check_one_variable_twice():
    """Two slices of an array have one variable: the second node would wait for the end of the group, so for itself."""
    tensor = mx.nd.ones((4, 2)) * (hvd.rank() + 1)
    hvd.grouped_allreduce_([tensor[0:2], tensor[2:4]], op=hvd.Sum)
    assert (tensor.asnumpy() == 3).all()
    hvd.grouped_allreduce_([tensor, tensor], op=hvd.Max)
    assert (tensor.asnumpy() == 3).all()
    hvd.grouped_allreduce([tensor, tensor[0:2]])[0].wait_to_read()
    for part in (tensor[0:2], tensor[2:4], tensor[0:2]):
        hvd.allreduce_(part, op=hvd.Sum)
    assert tensor.asnumpy()[:, 0].tolist() == [12, 12, 6, 6]


def convolved():
    return mx.nd.Convolution(
        mx.nd.ones((2, 8, 16, 16)), mx.nd.ones((16, 8, 3, 3)), no_bias=True, kernel=(3, 3), num_filter=16
    )


def check_blocked_layout():
    """oneDNN keeps the output of a convolution in a layout of its own, without a plain address."""
    expected = convolved().asnumpy() * 2
    for result in (
        hvd.allreduce(convolved(), op=hvd.Sum),
        hvd.allreduce_(convolved(), op=hvd.Sum),
        hvd.grouped_allreduce([convolved()], op=hvd.Sum)[0],
        hvd.broadcast(convolved(), 1) * 2,
        hvd.broadcast_(convolved(), 1) * 2,
        hvd.reducescatter(mx.nd.concat(convolved(), convolved(), dim=0), op=hvd.Sum),
        hvd.allgather(convolved())[2:] * 2,
    ):
        assert (result.asnumpy() == expected).all()
    from hvd_cluster.mxnet.arrays import buffer_in_node

    blocked = convolved()
    blocked.wait_to_read()
    with pytest.raises(ValueError, match=r"a layout of oneDNN.*MXNET_MKLDNN_ENABLED=0"):
        buffer_in_node(blocked)


def check_no_deleter():
    """MXNet may call one when Python has ended, which aborts the process now and then."""
    from hvd_cluster.mxnet import nodes

    deleters, push = [], nodes._push
    nodes._push = lambda *arguments: deleters.append(arguments[2]) or push(*arguments)
    try:
        hvd.grouped_allreduce([mx.nd.ones((2,)), mx.nd.ones((3,))])[1].wait_to_read()
    finally:
        nodes._push = push
    assert deleters == [None, None]


@pytest.mark.parametrize(
    "check",
    [
        check_no_deleter,
        check_order,
        check_many_in_flight,
        check_one_name,
        check_lifetime,
        check_errors,
        check_arrays_with_errors,
        check_fork_while_a_node_is_pending,
        check_loader_forks,
        check_one_variable_twice,
        check_blocked_layout,
    ],
)
def test_nodes(two, check):
    two.run(check)


def check_what_is_left():
    from hvd_cluster.mxnet import nodes

    mx.nd.waitall()
    assert not nodes._nodes
    assert not nodes._pending


def test_nothing_is_kept_of_nodes_that_have_ended(two):
    two.run(check_what_is_left)


PENDING_AT_THE_END = """
import hvd_cluster.mxnet as hvd, mxnet as mx
hvd.init()
for number in range(40):
    last = hvd.allreduce(mx.nd.ones((1000,)))
"""
RAISES_AT_THE_END = """
import hvd_cluster.mxnet as hvd, mxnet as mx
hvd.init()
if hvd.rank() == 0:
    alone = hvd.allreduce(mx.nd.ones((10,)), name="alone")
    raise ValueError("the script ends here")
"""
NAIVE = """
import hvd_cluster.mxnet as hvd, mxnet as mx
hvd.init()
first = hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum)
group = hvd.grouped_allreduce_([mx.nd.ones((2,)), mx.nd.ones((3,))], op=hvd.Sum)
assert all((each.asnumpy() == 2).all() for each in [first, *group])
try:
    hvd.allreduce(mx.nd.ones((2 + hvd.rank(),)))
except mx.MXNetError as error:
    print(error)
"""


MANY_ERRORS = """
import os
import hvd_cluster.mxnet, mxnet as mx
from hvd_cluster.mxnet import nodes

def push(array, starts):
    nodes._push_node(starts.append, array, 0, b"")

def stress():
    first, others = [mx.nd.zeros((4,)) for _ in range(3)], [mx.nd.zeros((4,)) for _ in range(500)]
    starts = []
    for array in [*first, *others]:
        push(array, starts)
    for _ in range(1000):
        for array in first:
            array += 1
    while len(starts) < 503:
        pass
    for number, start in enumerate(starts):
        nodes._complete(start, ValueError(f"error {number}"))
    mx.nd.waitall()

for _ in range(20):
    child = os.fork()
    if child == 0:
        try:
            stress()
        except mx.MXNetError:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
print("fine")
"""


def run_script(script, **variables):
    command = [sys.executable, "-m", "hvd_cluster", "-np", "2", sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env={**os.environ, **variables}
    )


def test_a_script_that_ends_with_nodes_in_flight():
    done = run_script(PENDING_AT_THE_END)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "terminate called" not in done.stderr


def test_a_script_that_raises_with_nodes_in_flight():
    done = run_script(RAISES_AT_THE_END)
    assert done.returncode != 0
    assert "ValueError: the script ends here" in done.stderr


def test_naive_engine_waits_and_raises_at_once():
    done = run_script(NAIVE, MXNET_ENGINE_TYPE="NaiveEngine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks disagree about the shape") == 2


def test_many_errors_while_mxnet_looks_for_errors():
    """The list of all errors in MXNet has no lock. Each child is a new process to it, in which the list may move."""
    command = [sys.executable, "-W", "ignore", "-c", MANY_ERRORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout == "fine\n", done.stderr


def check_lost_peer():
    if hvd.rank() == 1:
        os._exit(3)
    with pytest.raises(mx.MXNetError, match="rank 1"):
        hvd.allreduce(mx.nd.ones((2,)), name="alone").wait_to_read()


def test_a_rank_that_dies(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    alive, dead = pool.outcomes(check_lost_peer)
    alive.unwrap()
    assert dead is None
