"""An elastic job that grows when dynamic allocation brings an executor."""

import pytest
from spark_cluster import driver_result

pytestmark = pytest.mark.timeout(300)

GROWING = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
}
BODY = """
from hvd_cluster.spark import run_elastic
from spark_cluster import eventually
from spark_training import executors
from test_spark_elastic import train

eventually(lambda: len(executors(spark) - {"driver"}) == 1, 60)
steps = run_elastic(train, (FOLDER, 20, 2), num_proc=1, min_num_proc=1, max_num_proc=2, start_timeout=150)
result = {"executors": sorted(executors(spark)), "steps": steps}
"""


def test_a_job_of_one_rank_gets_another_one(tmp_path):
    (tmp_path / "go").touch()
    result = driver_result(f"FOLDER = {str(tmp_path)!r}\n{BODY}", tmp_path, f"session(**{GROWING})")
    assert len(result["executors"]) == 3  # with the driver
    (step, *first), (_, *second) = result["steps"]
    assert first == [0, 2]
    assert second == [1, 2]
    assert step > 20  # of which it made some alone
