"""Each parser with good inputs and the errors that it may raise for bad ones."""

import random
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgpack

from collectives.api import (
    DType,
    EngineError,
    HorovodInternalError,
    Operation,
    Parameters,
    ReduceOp,
    Request,
    SettingsError,
)
from collectives.controller.errors import ErrorData
from collectives.controller.messages import Abort, Ready, Response, Run, Together, decode, encode
from collectives.handshake.hello import Hello, pack_answer, pack_hello, unpack_answer, unpack_hello
from collectives.net.frames import Frames, frame, seal, unseal
from collectives.net.relay import pack_envelope, unpack_envelope
from collectives.observe.live.snapshot import Recording, Slow, Snapshot, Stall
from collectives.observe.timeline.address import pack_records, unpack_records
from collectives.observe.timeline.records import Record, TraceRow
from collectives.settings import Settings
from collectives.store.service import _parse_target, _parse_values, _Refusal
from collectives.store.signing import RefusedError, ServerTime
from executors.agents.hosts.messages import AgentHello
from executors.agents.spark.connection import TaskHello
from executors.dashboard.picture import Address
from executors.job.discovery import DiscoveryError, parse_host_file, parse_host_list, parse_hosts
from executors.job.job import JobSecret
from executors.job.worlds import Answer, LastReport, Published, Report, WorldCall
from executors.launchers.allocation import allocation_of
from executors.launchers.known_ports import RendezvousOffer
from executors.launchers.table import place_of
from hvd_cluster.cli.config_file import read_config
from tests.fuzz.mutations import mutated

VALUE = (ValueError, TypeError)
JSON = (*VALUE, KeyError, RecursionError)
"""Of parsers of values that only processes with the secret of the job can send."""
SECRET = b"s" * 32
NONCE = b"n" * 16
JOB = JobSecret(SECRET)


@dataclass(frozen=True)
class Parser:
    """``parse`` takes bytes, gives a value for each of ``inputs``, and raises ``errors`` only."""

    parse: Callable[[bytes], object]
    inputs: Sequence[bytes]
    errors: tuple[type[BaseException], ...]


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """``parse`` for what a program has read as text."""
    return lambda data: parse(data.decode("utf-8", "replace"))


def of_environment(parse: Callable[[dict[str, str]], object]) -> Callable[[bytes], object]:
    """``parse`` for lines NAME=VALUE. No variable of a process has a zero byte."""

    def call(data: bytes) -> object:
        lines = data.replace(b"\0", b"").decode("utf-8", "replace").split("\n")
        return parse(dict(line.partition("=")[::2] for line in lines))

    return call


def of_file(data: bytes) -> object:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        return read_config(file.name)


def of_frames(data: bytes) -> object:
    frames = Frames(1 << 10)
    return frames.feed(data)


def lines(**variables: object) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in variables.items()).encode()


REQUEST = Request("gradient", Operation.ALLREDUCE, DType.FLOAT32, (2, 3), ReduceOp.SUM, 0, 1.0, 0.5, 0, (), "cpu", 7)
MESSAGES = [
    Ready((REQUEST,), (1, 2), ((0, "a"),), (), (), ()),
    Together((1,), (2, 3), (), (REQUEST,), ((0, "key"),)),
    Run(((1, 2), (3,)), (Response(1, REQUEST, (4,)),), (), True, 5, Parameters(1 << 20, 1.0, False, 1, 1)),
    Abort(ErrorData("PeerLostError", "rank 1 is gone", ([1], ["a"], True))),
]
WORLDS = [
    Published(3, (("worker-0", "a"), ("worker-1", "b")), True, "worker-2 has left").encode(),
    Report("formed", 3, (1, 2), "text", 0.5, 1, 2, "0.1.0", "abc").encode(),
    Answer("return", 4, "worker-1").encode(),
]
LAST = LastReport("digest", "/path", True)
SNAPSHOT = Snapshot(
    1.5, 0, 2, 1, "a", 42, 7, 1 << 30, slow=(Slow(1, 0.5, "late"),), stalls=(Stall("g", (1,), 2.0, 3.0, 0),)
)
TARGETS = [b"GET /keys/worlds%2F3?wait=1.5", b"PUT /keys/a/b", b"POST /counters/n", b"DELETE /keys/a"]
CONFIGS = [
    b"num_proc: 2\nverbose: true\nparams:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 3.5\n",
    b"num_proc: 4\nhosts:\n  list: [a:2, b:2]\nelastic:\n  min_np: 2\n  blacklist_cooldown_range: [10, 20]\n",
    b"autotune: {enabled: true, gaussian_process_noise: 0.8}\nlogging: {level: debug}\nssh: {port: 22}\n",
]
LAUNCHERS = [
    lines(SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=1, SLURM_STEP_ID=5, SLURM_STEP_NODELIST="a,b[1-2]", SLURM_LOCALID=0),
    lines(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_LOCAL_RANK=0, PMIX_NAMESPACE="x"),
    lines(PMI_RANK=1, PMI_SIZE=2, PMI_FD=3, MPI_LOCALRANKID=0),
    lines(LSB_JOBID=1, LSB_MCPU_HOSTS="batch 1 h1 4 h2 4", JSM_NAMESPACE_RANK=1, JSM_NAMESPACE_SIZE=8),
    lines(RANK=1, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="a", MASTER_PORT=29500, TORCHELASTIC_RUN_ID="x"),
]
ALLOCATIONS = [
    lines(SLURM_JOB_NODELIST="n[01-03,7]", SLURM_TASKS_PER_NODE="2(x3),1", SLURM_NTASKS=7, SLURMD_NODENAME="n01"),
    lines(SLURM_JOB_NODELIST="a,b[1-2]c[5-6]", SLURM_JOB_CPUS_PER_NODE="8(x2),4,1(x2)", SLURM_CPUS_PER_TASK=2),
    lines(LSB_JOBID=1, LSB_MCPU_HOSTS="batch 1 h1 4 h2 4"),
    lines(LSB_JOBID=1, LSB_HOSTS="batch h1 h1 h2 h2"),
]
SETTINGS = [
    lines(HOROVOD_RANK=0, HOROVOD_SIZE=2, HOROVOD_FUSION_THRESHOLD=1024, HOROVOD_CYCLE_TIME=1.5, HOROVOD_AUTOTUNE=1),
    lines(HOROVOD_STALL_CHECK_TIME_SECONDS=60, HOROVOD_GLOO_TIMEOUT_SECONDS=30, HVD_METRICS_PORT=9100),
    lines(HOROVOD_TIMELINE="/tmp/t.json", HOROVOD_LOG_LEVEL="info", HOROVOD_CPU_OPERATIONS="shm", HVD_TCP_TLS=0),
]
HELLO = Hello(1, 2, "host", (0, 1), {"HOROVOD_CPU_OPERATIONS": "shm"}, "job", 3)
TASK = TaskHello(1, NONCE.hex())

PARSERS = {
    "hello": Parser(unpack_hello, [pack_hello(HELLO, NONCE, "listener")], VALUE),
    "sealed hello": Parser(
        lambda data: unseal(SECRET, NONCE, data),
        [seal(SECRET, NONCE, pack_hello(HELLO, NONCE, "x"))],
        (PermissionError,),
    ),
    "answer": Parser(
        unpack_answer,
        [pack_answer(["a", 1]), pack_answer("text", None)],
        (*VALUE, HorovodInternalError, SettingsError),
    ),
    "message": Parser(decode, [encode(each) for each in MESSAGES], (EngineError,)),
    "envelope": Parser(unpack_envelope, [pack_envelope((1, 2, 3), b"data")], (EngineError,)),
    "frames": Parser(of_frames, [frame(b"one") + frame(b"two")], (PermissionError,)),
    "records": Parser(unpack_records, [*pack_records([Record(TraceRow("row", 1), "{}")])], VALUE),
    "snapshot": Parser(Snapshot.decode, [SNAPSHOT.encode()], VALUE),
    "recording": Parser(Recording.decode, [Recording(1, "/tmp/x", 2.0).encode()], VALUE),
    "world": Parser(Published.decode, WORLDS[:1], JSON),
    "report": Parser(Report.decode, WORLDS[1:2], JSON),
    "replacement": Parser(Answer.decode, WORLDS[2:], JSON),
    "last report": Parser(of_text(LastReport.decode), [LAST.encode().encode()], JSON),
    "call": Parser(WorldCall.decode, [WorldCall(3, True).encode(), WorldCall(12).encode()], VALUE),
    "time": Parser(ServerTime.decode, [ServerTime("0" * 32, 12.5).encode()], (RefusedError,)),
    "target": Parser(of_text(lambda line: _parse_target(*line.partition(" ")[::2])), TARGETS, (_Refusal, ValueError)),
    "values": Parser(_parse_values, [msgpack.packb({"a": b"1", "b": b""})], (_Refusal,)),
    "agent": Parser(AgentHello.decode, [AgentHello("a").encode()], JSON),
    "task": Parser(lambda data: TaskHello.unseal(JOB, NONCE, data), [TASK.seal(JOB, NONCE)], (PermissionError,)),
    "offer": Parser(RendezvousOffer.unpack, [RendezvousOffer(["10.0.0.1"], 4000, JOB).pack()], (SettingsError,)),
    "address": Parser(of_text(Address.parse), [b"0.0.0.0:8080", b"[::1]:80"], (ValueError,)),
    "host list": Parser(of_text(parse_host_list), [b"a:2,user@b.c:4"], (ValueError,)),
    "host file": Parser(of_text(parse_host_file), [b"a slots=2\n# comment\nb:4\n"], (ValueError,)),
    "discovery": Parser(of_text(lambda text: parse_hosts(text, 2, "x")), [b"a:2\nb\n[fd00::1]:3\n"], (DiscoveryError,)),
    "configuration": Parser(of_file, CONFIGS, (ValueError,)),
    "allocation": Parser(of_environment(allocation_of), ALLOCATIONS, (SettingsError,)),
    "launcher": Parser(of_environment(place_of), LAUNCHERS, (SettingsError,)),
    "settings": Parser(of_environment(Settings.from_environment), SETTINGS, (SettingsError,)),
}


class UnreadableError(AssertionError):
    """A parser raised another error for ``data`` than it says, or took too long, or too much memory."""

    def __init__(self, name: str, data: bytes, error: BaseException) -> None:
        super().__init__(f"{name}: {type(error).__name__}: {str(error)[:200]}; for {data[:500]!r}")
        self.data = data


MOST_SECONDS = 2
MOST_BYTES = 1 << 30


@contextmanager
def limits() -> Iterator[None]:
    """A parser that needs more than MOST_BYTES of memory, or MOST_SECONDS, gets an error. For the main thread."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    earlier = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, earlier[1]))
    handler = signal.signal(signal.SIGALRM, _out_of_time)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, earlier)


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS} s")


def check(name: str, data: bytes) -> bool:
    """Whether the parser ``name`` finds a value in ``data``. Raises UnreadableError where it breaks its word."""
    parser = PARSERS[name]
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        found = parser.parse(data)
    except parser.errors:
        return False
    except BaseException as error:  # a RecursionError or a MemoryError, too
        raise UnreadableError(name, data, error) from error
    return found is not None


def shrunk(name: str, failure: UnreadableError) -> UnreadableError:
    """A shorter input with the same fault: pieces are left out as long as it stays."""
    size = len(failure.data) // 2
    while size:
        for first in range(0, len(failure.data), size):
            try:
                check(name, failure.data[:first] + failure.data[first + size :])
            except UnreadableError as shorter:
                if type(shorter.__cause__) is type(failure.__cause__):
                    failure = shorter
                    break
        else:
            size //= 2
    return failure


def search(name: str, rng: random.Random, count: int) -> int:
    """Try so many bad inputs; the number of those that the parser took. Raises UnreadableError."""
    parser, taken = PARSERS[name], 0
    with limits():
        for data in parser.inputs:
            assert check(name, data), f"{name} does not take {data!r}"
        for _ in range(count):
            try:
                taken += check(name, mutated(rng, parser.inputs))
            except UnreadableError as failure:
                raise shrunk(name, failure) from failure
    return taken
