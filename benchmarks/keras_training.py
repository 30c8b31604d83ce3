"""Training steps of Keras and TensorFlow with hvd-cluster against tf.distribute, launches interleaved.

    python -m benchmarks.keras_training --ranks 2

The cases: an MLP 784-2048-2048-10, batch 32 a rank, float32, SGD with momentum, through ``model.fit`` and through a
custom loop in a tf.function, each also compiled by XLA, which has no peer of its own; and 200 gradients of 20 KB that a
tf.function combines. The peer is MultiWorkerMirroredStrategy on as many processes. ``model.fit`` of Keras 3 does not
run under it (it gets values that it cannot convert to tensors), so the peer of all cases of the MLP is a custom loop:
``strategy.run`` of a step in which the optimizer of Keras itself sums the gradients over the replicas. One compute
thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import Row, add_launches_argument, add_report_arguments, report

WIDTHS = [784, 2048, 2048, 10]
BATCH = 32
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
CASES = {
    "MLP, model.fit": "images/s",
    "MLP, model.fit, compiled": "images/s",
    "MLP, custom loop": "images/s",
    "MLP, custom loop, compiled": "images/s",
    "200 gradients of 20 KB": "steps/s",
}


def build(keras: Any) -> Any:
    """The MLP, the same on every rank and side."""
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(width, "relu") for width in WIDTHS[1:-1]]
    return keras.Sequential([keras.Input((WIDTHS[0],)), *hidden, keras.layers.Dense(WIDTHS[-1])])


def speed(step: Callable[[], Any], steps: int, per_step: float) -> float:
    """``per_step`` of something a second: the best of five rounds of ``steps``, after one that warms up."""
    rounds = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(steps):
            result = step()
        getattr(result, "numpy", lambda: None)()
        rounds.append(per_step * steps / (time.perf_counter() - begin))
    return statistics.median(rounds[1:])


def data(tf: Any, rank: int, steps: int) -> Any:
    """A data set that has one batch in memory, ``steps`` times.

    TensorFlow does not tune it: otherwise the end of an epoch may wait for the thread that tunes, which sleeps twice as
    long each time. Epochs then take 1.28, 2.55, 5.11 s and so on, whatever the model does.
    """
    random = tf.random.Generator.from_seed(rank)
    images = random.normal((BATCH, WIDTHS[0]))
    labels = random.uniform((BATCH,), 0, WIDTHS[-1], tf.int32)
    options = tf.data.Options()
    options.autotune.enabled = False
    return images, labels, tf.data.Dataset.from_tensors((images, labels)).cache().repeat(steps).with_options(options)


def loss_of(keras: Any) -> Any:
    """Cross entropy."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(keras: Any) -> Any:
    """SGD with momentum."""
    return keras.optimizers.SGD(0.001, momentum=0.9)


def fit(keras: Any, optimizer: Any, batches: Any, images: float, steps: int, compiled: bool) -> float:
    """Images a second of ``model.fit``."""
    model = build(keras)
    model.compile(optimizer=optimizer, loss=loss_of(keras), jit_compile=compiled)
    return speed(lambda: model.fit(batches, verbose=0), 1, images * steps)


def run_ours(steps: int) -> dict[str, float]:
    """Every case on this rank."""
    import keras
    import tensorflow as tf

    import hvd_cluster.tensorflow as hvd

    hvd.init()
    images, labels, batches = data(tf, hvd.rank(), steps)
    loss, model, optimizer, total = loss_of(keras), build(keras), sgd(keras), BATCH * hvd.size()
    optimizer.build(model.trainable_variables)

    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        gradients = hvd.DistributedGradientTape(tape).gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    found = {}
    for compiled, end in ((False, ""), (True, ", compiled")):
        found[f"MLP, custom loop{end}"] = speed(tf.function(step, jit_compile=compiled), steps, total)
        wrapped = hvd.DistributedOptimizer(sgd(keras))
        found[f"MLP, model.fit{end}"] = fit(keras, wrapped, batches, total, steps, compiled)
    found["200 gradients of 20 KB"] = speed(_exchange_of_ours(tf, hvd), steps, 1)
    hvd.shutdown()
    return found


def _exchange_of_ours(tf: Any, hvd: Any) -> Callable[[], Any]:
    variables = [tf.Variable(tf.ones(5000), name=f"v{number}") for number in range(200)]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(variable * 2.0) for variable in variables])
        gradients = hvd.DistributedGradientTape(tape).gradient(value, variables)
        return tf.add_n([gradient[0] for gradient in gradients])

    return step


def run_theirs(steps: int) -> dict[str, float]:
    """Every case on this worker of MultiWorkerMirroredStrategy."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    images, labels, _ = data(tf, rank, steps)
    with strategy.scope():
        model, optimizer = build(keras), sgd(keras)
        optimizer.build(model.trainable_variables)
    loss = loss_of(keras)

    def replica() -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True)) / workers
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    step = tf.function(lambda: strategy.experimental_local_results(strategy.run(replica))[0])
    found = {"MLP, custom loop": speed(step, steps, BATCH * workers)}
    found["200 gradients of 20 KB"] = speed(_exchange_of_theirs(tf, strategy), steps, 1)
    return found


def _exchange_of_theirs(tf: Any, strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        variables = [tf.Variable(tf.ones(5000), name=f"v{number}") for number in range(200)]

    def replica() -> Any:
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(variable * 2.0) for variable in variables])
        gradients = tape.gradient(value, variables)
        average = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        return tf.add_n([gradient[0] for gradient in average])

    return tf.function(lambda: strategy.experimental_local_results(strategy.run(replica))[0])


def work(side: str, steps: int) -> None:
    """Runs on every rank; the first one writes its speeds."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    found = run_ours(steps) if side == "ours" else run_theirs(steps)
    sys.stdout.write(json.dumps(found) + "\n")


def launch(side: str, ranks: int, steps: int) -> dict[str, float]:
    """The speeds of one launch, as rank 0 sees them."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.keras_training", "--side", side, "--steps", str(steps)]
    if side == "ours":
        launcher = [sys.executable, "-m", "hvd_cluster.cli.hvdrun", "-np", str(ranks)]
        return _speeds(_outputs([subprocess.Popen([*launcher, *command], env=environment, **PIPES)])[0])
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(ranks)]
    processes = []
    for index in range(ranks):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        variables = {**environment, "TF_CONFIG": json.dumps(cluster), "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=variables, **PIPES))
    return _speeds(_outputs(processes)[0])


def _outputs(processes: list[Any]) -> list[str]:
    """The standard outputs; RuntimeError if a process failed."""
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(errors[-2000:])
    return [output for output, _ in outputs]


def _speeds(output: str) -> dict[str, float]:
    """From the last line of rank 0, which a launcher may have prefixed."""
    lines = [line.partition("{") for line in output.splitlines() if "{" in line and not line.startswith("[1]")]
    found: dict[str, float] = json.loads("{" + lines[-1][2])
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def rows(ranks: int, launches: int, steps: int) -> list[Row]:
    """A row for each case: medians over the launches, which alternate between the sides."""
    speeds: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(launches):
        for side, found in speeds.items():
            found.append(launch(side, ranks, steps))
    made = []
    for case, unit in CASES.items():
        ours = [found[case] for found in speeds["ours"]]
        peer = [found.get(case, found["MLP, custom loop"]) for found in speeds["peer"]]
        made.append(Row(case, ranks, unit, statistics.median(ours), statistics.median(peer), max(ours)))
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a round, of which there are six (default: 40)")
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    add_launches_argument(parser, 3)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments.side, arguments.steps)
        return
    found = rows(arguments.ranks, arguments.launches, arguments.steps)
    report("training with Keras: ours and MultiWorkerMirroredStrategy", found, arguments)


if __name__ == "__main__":
    from benchmarks.keras_training import main as importable_main

    importable_main()
