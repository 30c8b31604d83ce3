import os
import subprocess
import sys

import pytest

from executors.job.environment import THREADS, share, thread_remark, thread_variables, threads_of


@pytest.mark.parametrize(("cores", "ranks", "each"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 3, 2), (64, 2, 32)])
def test_the_share_of_a_rank(cores, ranks, each):
    assert share(cores, ranks) == each
    assert thread_variables({}, cores, ranks) == ({THREADS: str(each)} if ranks > 1 else {})


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({THREADS: "8"}, {}),
        ({THREADS: " "}, {THREADS: "4"}),
        ({"MKL_NUM_THREADS": "1"}, {}),
        ({"OPENBLAS_NUM_THREADS": "1"}, {}),
        ({"OPENBLAS_NUM_THREADS": ""}, {THREADS: "4"}),
    ],
)
def test_a_variable_of_the_user_stays(environment, added):
    assert thread_variables(environment, 8, 2) == added


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 8),
        ({THREADS: "3"}, 3),
        ({THREADS: "4,2"}, 4),
        ({THREADS: "many"}, 8),
        ({THREADS: "0"}, 8),
        ({"MKL_NUM_THREADS": "2"}, 2),
        ({"OPENBLAS_NUM_THREADS": "5"}, 8),  # torch does not read it
        ({THREADS: "3", "MKL_NUM_THREADS": "2"}, 2),
        ({THREADS: "3", "OPENBLAS_NUM_THREADS": "5"}, 3),
    ],
)
def test_the_threads_of_a_rank(environment, number):
    assert threads_of(environment, 8) == number


def test_threads_exceed_the_cores_only_where_fewer_would_not():
    fitting = [(1, 2, 2), (1, 2, 16), (2, 2, 1), (4, 8, 2)]
    assert [thread_remark(*numbers) for numbers in fitting] == [""] * 4
    assert thread_remark(2, 2, 2) == (
        "2 ranks with up to 2 threads each share 2 cores, which slows all of them down; set OMP_NUM_THREADS=1 in the "
        "environment of the ranks"
    )


@pytest.mark.parametrize("name", ["MKL_NUM_THREADS", THREADS, "OPENBLAS_NUM_THREADS"])
def test_torch_counts_its_threads_as_threads_of_does(name):
    pytest.importorskip("torch")
    chosen = {name: "1"}
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")} | chosen
    count = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    done = subprocess.run(count, env=environment, check=True, capture_output=True, text=True)
    cores = len(os.sched_getaffinity(0))
    assert int(done.stdout) == threads_of(chosen, cores)
