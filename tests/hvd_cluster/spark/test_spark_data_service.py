"""A data service in two executors of Spark, which this process reads from."""

import pytest
from pyspark.util import inheritable_thread_target

tensorflow_data = pytest.importorskip("hvd_cluster.tensorflow.data", exc_type=ImportError)
SECONDS = 100

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes", "threads"),  # Spark and grpc keep some
    pytest.mark.timeout(240),
]


def test_the_command_serves_until_it_is_shut_down(spark, tmp_path):
    import threading

    import tensorflow as tf

    from hvd_cluster.spark.tensorflow.compute_worker import main

    path, codes = tmp_path / "service.json", []
    arguments = [str(path), "--num-proc", "2", "--dispatchers", "2", "--timeout", str(SECONDS)]
    command = threading.Thread(target=inheritable_thread_target(spark)(lambda: codes.append(main(arguments))))
    command.start()
    config = tensorflow_data.TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=SECONDS)
    assert (config.dispatchers, config.workers_per_dispatcher) == (2, 1)
    for rank in range(3):
        dataset = tf.data.Dataset.range(20).send_to_data_service(config, rank, 3)
        assert sorted(int(number) for number in dataset) == list(range(20))
    with config.compute_client() as client:
        client.shutdown()
    command.join(SECONDS)
    assert codes == [0]


def test_workers_must_be_a_multiple_of_the_dispatchers(spark, tmp_path):
    from hvd_cluster.spark.tensorflow.compute_worker import main

    with pytest.raises(ValueError, match="3 workers cannot be shared out among --dispatchers 2"):
        main([str(tmp_path / "service.json"), "--num-proc", "3", "--dispatchers", "2"])
    assert not list(tmp_path.iterdir())
