"""The data service with real servers in processes of their own; this process plays the ranks that read."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

from tests.hvd_cluster.tensorflow.data.jobs import SECONDS, kill, serving

pytestmark = [pytest.mark.leaves("descriptors"), pytest.mark.timeout(2 * SECONDS)]  # grpc keeps connections
ELEMENTS = list(range(60))


@pytest.fixture
def data(tf):
    from hvd_cluster.tensorflow import data

    return data


def numbers(dataset):
    return [int(number) for number in dataset]


def together(*functions):
    """The results of ``functions``, which run at the same time."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result(SECONDS) for future in [threads.submit(function) for function in functions]]


def listening():
    """The ports on which this process listens."""
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_each_element_comes_once(tf, data, config):
    dataset = tf.data.Dataset.range(60).map(lambda number: 2 * number)
    assert sorted(numbers(dataset.send_to_data_service(config, rank=0))) == [2 * number for number in ELEMENTS]


def test_dtypes_and_shapes_stay(tf, config):
    dataset = tf.data.Dataset.from_tensor_slices({"x": tf.zeros([8, 3], tf.bfloat16), "name": tf.fill([8], "a")})
    result = dataset.send_to_data_service(config, 0)
    assert result.element_spec == dataset.element_spec
    assert [(each["x"].shape, each["name"].dtype) for each in result] == [((3,), tf.string)] * 8


def test_every_worker_has_all_elements_in_parallel_epochs(tf, data, config):
    result = data.send_to_data_service(tf.data.Dataset.range(60), config, 0, processing_mode="parallel_epochs")
    assert sorted(numbers(result)) == sorted(ELEMENTS * 2)


def test_ranks_that_reuse_a_dataset_share_its_elements(tf, config):
    def rank(number):
        dataset = tf.data.Dataset.range(60)
        return dataset.send_to_data_service(config, number, 2, reuse_dataset=True, job_name="shared")

    readers = [iter(rank(0)), iter(rank(1))]
    firsts = [int(next(reader)) for reader in readers]
    rest = together(*(lambda reader=reader: numbers(reader) for reader in readers))
    assert sorted(firsts + rest[0] + rest[1]) == ELEMENTS


def test_ranks_that_do_not_share_read_all(tf, config):
    results = [tf.data.Dataset.range(60).send_to_data_service(config, rank, 2) for rank in range(2)]
    assert [sorted(numbers(result)) for result in results] == [ELEMENTS] * 2


def test_two_datasets_are_two_jobs(tf, config):
    """Training and validation of one rank, with the names that the service finds for itself."""
    first, second = (
        tf.data.Dataset.range(start, start + 5).send_to_data_service(config, 0, 1, reuse_dataset=True)
        for start in (0, 100)
    )
    assert sorted(numbers(first)) == list(range(5))
    assert sorted(numbers(second)) == list(range(100, 105))


def test_ranks_take_turns(tf, config):
    """In each round one worker serves all ranks, so elements of one round have one origin."""

    def rank(number):
        dataset = tf.data.Dataset.range(60).repeat()
        result = dataset.send_to_data_service(config, number, 2, "parallel_epochs", round_robin=True, job_name="turns")
        return numbers(result.take(40))

    first, second = together(lambda: rank(0), lambda: rank(1))
    assert len(first) == len(second) == 40
    # Each worker gives neighbours to the two ranks of a round.
    assert {abs(one - other) for one, other in zip(first, second, strict=True)} <= {1, 59}


@pytest.mark.parametrize(
    ("options", "text"),
    [({"round_robin": True}, "round_robin=True needs size"), ({"job_name": "a"}, "job_name='a' is for elements that")],
)
def test_options_that_do_not_fit(tf, config, options, text):
    with pytest.raises(ValueError, match=text):
        tf.data.Dataset.range(60).send_to_data_service(config, 0, **options)


@pytest.mark.leaves("descriptors", "threads")  # a graph may be called until the end of the process
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")
def test_in_a_graph(tf, config):
    @tf.function
    def total():
        result = tf.constant(0, tf.int64)
        for number in tf.data.Dataset.range(60).send_to_data_service(config, 0):
            result += number
        return result

    assert int(total()) == sum(ELEMENTS)


def test_the_address_of_the_service(tf, data, config):
    with data.tf_data_service(config, 0) as service:
        distribute = tf.data.experimental.service.distribute("distributed_epoch", service)
        assert sorted(numbers(tf.data.Dataset.range(60).apply(distribute))) == ELEMENTS


def test_nothing_stays_open_in_a_reader(tf, data, config):
    before, threads = listening(), threading.active_count()
    dataset = tf.data.Dataset.range(60).send_to_data_service(config, 0)
    assert listening() - before
    numbers(dataset)
    del dataset
    assert listening() == before
    assert threading.active_count() <= threads


def test_readers_of_another_key_are_refused(tf, config):
    from collectives.api import SettingsError

    with pytest.raises(SettingsError, match="is not to be trusted"):
        tf.data.Dataset.range(60).send_to_data_service(replace(config, key=b"another"), 0)


@contextmanager
def read_until_failure(tf, dataset):
    """Calls the block after the first elements; the failure is in the list."""
    failures = []
    iterator = iter(dataset)
    numbers([next(iterator) for _ in range(5)])
    yield failures
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        numbers(iterator)
    failures.append(str(caught.value))


def test_dispatchers_in_the_ranks_that_train(tf, data, tmp_path):
    """Orderly reading by two ranks, of which one has the dispatcher; then the loss of a worker."""
    before = listening()
    with serving(tmp_path, 2, "training") as (config, job):
        with pytest.raises(RuntimeError, match='the dispatchers are on the side "training"'):
            tf.data.Dataset.range(60).send_to_data_service(config, 0)

        def rank(number):
            with data.tf_data_service(config, number) as service:
                own = tf.data.experimental.service
                distribute = own.distribute("distributed_epoch", service, job_name="shared")
                return numbers(tf.data.Dataset.range(60).apply(distribute))

        with data.tf_data_service(config, 0) as service:
            distribute = tf.data.experimental.service.distribute("distributed_epoch", service)
            first, second = together(lambda: rank(1), lambda: rank(3))
            assert sorted(first + second) == ELEMENTS
            with read_until_failure(tf, tf.data.Dataset.range(60).repeat().apply(distribute)) as failures:
                kill(tmp_path, 1)
        assert "worker 1 of dispatcher 0 on 127.0.0.1" in failures[0]
        assert "has died" in failures[0]
        code, log = job.result()
        assert code != 0
        assert "has died" in log
    assert listening() == before


def test_a_dispatcher_that_dies(tf, data, tmp_path):
    with serving(tmp_path, 2, "compute") as (config, job):
        dataset = tf.data.Dataset.range(60).repeat().send_to_data_service(config, 0)
        with read_until_failure(tf, dataset) as failures:
            kill(tmp_path, 0)
        assert "of dispatcher 0" in failures[0] or "dispatcher 0 at 127.0.0.1" in failures[0]
        assert job.result()[0] != 0
