"""An elastic job on Spark in a thread, and what a test does to its processes."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
from pyspark.util import inheritable_thread_target
from spark_cluster import eventually

SECONDS = 150


class Training:
    """A job in a thread, and what its workers wrote to a folder."""

    def __init__(self, spark, folder, job):
        self.folder = folder
        self._future = ThreadPoolExecutor(1).submit(inheritable_thread_target(spark)(job))

    def until(self, size, *workers):
        """Wait until all ``workers`` train among ``size`` ranks."""
        eventually(lambda: self._future.done() or all(self._size(worker) == size for worker in workers), SECONDS)
        assert not self._future.done(), self._future.result()

    def successor(self, size, *known):
        """The worker that trains among ``size`` ranks and is none of ``known``, when there is one."""
        found = []

        def has_come():
            names = {path.stem for path in self.folder.glob("worker-*.step")}
            numbers = {int(name.removeprefix("worker-")) for name in names} - set(known)
            found[:] = [number for number in sorted(numbers) if self._size(number) == size]
            return self._future.done() or found

        eventually(has_come, SECONDS)
        assert not self._future.done(), self._future.result()
        return found[0]

    def _size(self, worker):
        try:
            return int((self.folder / f"worker-{worker}.step").read_text().split()[1])
        except (FileNotFoundError, IndexError):
            return 0

    def process(self, worker):
        return psutil.Process(int((self.folder / f"worker-{worker}").read_text()))

    def results(self):
        (self.folder / "go").touch()
        return self._future.result(SECONDS)


def agent_of(process):
    """The task that started a worker, under a guard."""
    return process.parent().parent()


def agents():
    """All tasks that are connected to this process, which is their driver."""
    ports = {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return {each for each in psutil.Process().children(recursive=True) if _is_agent(each, ports)}


def _is_agent(process, ports):
    try:
        peers = {each.raddr.port for each in process.net_connections("tcp") if each.raddr}
        return "pyspark.daemon" in process.cmdline() and bool(ports & peers)
    except psutil.Error:  # it has ended
        return False


@contextmanager
def decommissioned(spark, executor):
    """A cluster manager needs the machine back; at the end it takes it, and Spark starts another executor."""
    context, before = spark.sparkContext, executors(spark)
    jvm, backend = context._jvm, context._jsc.sc().schedulerBackend()
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("the machine is needed", jvm.scala.Option.empty())
    backend.decommissionExecutor(executor.cmdline()[executor.cmdline().index("--executor-id") + 1], info, False, False)
    try:
        yield
    finally:
        executor.kill()
        eventually(lambda: executors(spark) - before, SECONDS)


def executors(spark):
    """The ids of the present executors."""
    infos = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return {infos.apply(index).id() for index in range(infos.size())}


def executor_of(worker):
    return next(parent for parent in worker.parents() if "--executor-id" in parent.cmdline())


def wait_at_gate(folder):
    """In a worker: until the test has killed an executor, see :func:`with_a_killed_executor`."""
    deadline = time.monotonic() + SECONDS
    Path(folder, f"{os.getpid()}.waits").touch()
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def with_a_killed_executor(spark, fit, folder):
    """The result of ``fit``, in which two workers come to :func:`wait_at_gate`; the executor of one is killed."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(inheritable_thread_target(spark)(fit))
        eventually(lambda: future.done() or len(list(folder.glob("*.waits"))) == 2, SECONDS)
        assert not future.done(), future.result()
        victim = psutil.Process(int(next(folder.glob("*.waits")).stem))
        executor_of(victim).kill()
        eventually(lambda: not victim.is_running(), SECONDS)  # or else it might do all of its work before it ends
        (folder / "go").touch()
        return future.result(SECONDS)
