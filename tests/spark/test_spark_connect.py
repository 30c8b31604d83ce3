"""Spark Connect: a client, which has no SparkContext, and a server in a process of its own."""

import pytest
from spark_cluster import driver_result

pytestmark = pytest.mark.timeout(240)

BODY = """
import io, os
from executors.api import StartTimeoutError
from hvd_cluster.spark import run

def rank():
    print("hello")
    return int(os.environ["HOROVOD_RANK"])

def fail():
    if rank() == 1:
        raise KeyError("rank 1 has had enough")
    import time
    time.sleep(600)

def error_of(*arguments, **options):
    try:
        run(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)

output = io.StringIO()
result = {
    "ranks": run(rank, num_proc=2, stdout=output),
    "output": sorted(output.getvalue().splitlines()),
    "failure": error_of(fail, num_proc=2),
    "default": error_of(rank),
    "too many": error_of(rank, num_proc=3, start_timeout=2),
    "after": run(rank, num_proc=1),
}
"""


def test_a_client_of_spark_connect(tmp_path):
    result = driver_result(BODY, tmp_path, 'connect("local[2]")')
    assert result["ranks"] == [0, 1]
    assert result["output"] == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert result["failure"] == ["KeyError", "'rank 1 has had enough'"]
    assert result["default"][0] == "ValueError"
    assert result["default"][1].startswith("num_proc must be given: only the server of Spark Connect knows")
    assert result["too many"][0] == "StartTimeoutError"
    assert result["too many"][1].startswith("0 of 3 workers started within 2 s")
    assert result["after"] == [0]
