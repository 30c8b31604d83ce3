"""The examples for Spark run one after another in one driver; a script is submitted as on a cluster."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from spark_cluster import JAVA_OPTIONS

from tests import startup

# The first test runs all examples.
pytestmark = pytest.mark.timeout(1000)

ROOT = Path(__file__).parents[3]
OPTIONS = {
    "spark_digits.py": [],
    "spark_regression.py": ["--rows", "20000", "--epochs", "1"],
    "spark_wide_deep.py": ["--rows", "4000", "--epochs", "1"],
    "spark_estimator_torch.py": ["--epochs", "6"],
    "spark_estimator_lightning.py": ["--hidden", "16", "--epochs", "8"],
    "spark_estimator_keras.py": ["--rows", "20000", "--epochs", "2"],
    "elastic_spark.py": ["--epochs", "1"],
}
EPOCH = r"\[0\]<stdout>:epoch {number}{told}   held-out \w+ \d+\.\d{{4}}.*"
AGREE = r"parameters: bit for bit the same on 2 of 2 ranks, sha256 [0-9a-f]{16}"


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """``run_of(name)``: the exit code and the output of an example. One driver runs them all; its Keras is on torch."""
    folder = tmp_path_factory.mktemp("examples")
    script = Path(__file__).with_name("spark_examples.py")
    variables = {"PYTHONPATH": startup.PATH, "SPARK_SUBMIT_OPTS": JAVA_OPTIONS, "KERAS_BACKEND": "torch"}
    run = subprocess.run(
        [sys.executable, script, ROOT / "examples", folder, json.dumps(OPTIONS)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr

    def get(name):
        code, out, error = ((folder / f"{name}.{kind}").read_text() for kind in ("code", "out", "error"))
        return CompletedProcess(name, int(code), out, error)

    return get


def test_digits(run_of):
    run = run_of("spark_digits.py")
    assert run.returncode == 0, run.stderr
    *epochs, verdict = run.stdout.splitlines()[:16]
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(EPOCH.format(number=f"{number:2}", told=r"   rows by rank \[\d+, \d+\]"), line)
    assert sum(map(int, re.findall(r"\d+", re.search(r"\[\d+, \d+\]", epochs[0]).group()))) == 1437
    assert re.fullmatch(AGREE, verdict)
    *digits, accuracy = run.stdout.splitlines()[16:]
    counts = [re.match(r"digit (\d) +(\d+) of +(\d+) ", line).groups() for line in digits]
    right, total = (sum(int(count[column]) for count in counts) for column in (1, 2))
    assert ([int(digit) for digit, _, _ in counts], total) == (list(range(10)), 360)
    assert accuracy == f"held-out accuracy: {right / total:.4f}"


def test_regression_says_that_it_has_not_learned_enough(run_of):
    run = run_of("spark_regression.py")
    epoch, verdict, *_ = run.stdout.splitlines()
    assert re.fullmatch(EPOCH.format(number="1", told=""), epoch), run.stderr
    assert re.fullmatch(AGREE, verdict)
    assert run.stdout.count("|") == 6 * 8  # the heading and five rows
    said = re.compile(r"held-out error: \d+\.\d{4}, more than 1\.1; give more .*")
    assert any(map(said.fullmatch, run.stderr.splitlines()))
    error = re.search(r"held-out error (\d+\.\d+)", epoch).group(1)
    assert f"held-out error: {error}" in run.stderr  # the ranks and Spark see the same rows and the same network


def test_a_recommender_with_sparse_gradients(run_of):
    run = run_of("spark_wide_deep.py")
    assert run.returncode == 0, run.stderr
    epoch, best, size = run.stdout.splitlines()
    assert re.fullmatch(r"epoch 1   held-out AUC \d\.\d{4} +[\d,]+ rows/s", epoch)
    assert re.fullmatch(r"who knows the true chances has 0\.[89]\d{3}", best)
    sparse, dense = re.fullmatch(r"gradients of a step: ([\d,]+) bytes, dense they would be ([\d,]+)", size).groups()
    assert int(sparse.replace(",", "")) < int(dense.replace(",", ""))


def test_an_estimator(run_of):
    run = run_of("spark_estimator_torch.py")
    assert run.returncode == 0, run.stderr
    *epochs, accuracy = run.stdout.splitlines()
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(
            rf"epoch {number:2}   training \d\.\d{{4}}   validation \d\.\d{{4}} #* *   accuracy \d\.\d{{4}}", line
        )
    assert len(epochs) == 6
    assert "#" * 40 in epochs[0]
    assert float(re.fullmatch(r"test accuracy: (\d\.\d{4})", accuracy).group(1)) >= 0.95
    assert run.stderr.count(" rows/s, loss ") == 6


def test_a_pipeline_with_lightning(run_of):
    run = run_of("spark_estimator_lightning.py")
    assert run.returncode == 0, run.stderr
    found, *epochs, accuracy = run.stdout.splitlines()
    assert re.fullmatch(r"16 hidden: accuracy \d\.\d{4} on rows of the other folds", found)
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(
            rf"epoch {number:2}   training \d\.\d{{4}}   validation \d\.\d{{4}} #* *   accuracy \d\.\d{{4}}", line
        )
    assert len(epochs) == 8
    assert "#" * 40 in epochs[0]
    assert float(re.fullmatch(r"test accuracy: (\d\.\d{4})", accuracy).group(1)) >= 0.9


def test_an_estimator_for_keras(run_of):
    run = run_of("spark_estimator_keras.py")
    assert re.fullmatch(r"test error: \d\.\d{4}, more than 1\.3; give more .*", run.stderr.splitlines()[-1]), run.stderr
    epochs = run.stdout.splitlines()[:2]
    for number, line in enumerate(epochs, 1):
        told = r"training \d\.\d{4}   validation \d\.\d{4} #+ *   mean absolute error \d\.\d{4}"
        assert re.fullmatch(rf"epoch {number:2}   {told}", line)
    assert "#" * 40 in epochs[0]
    assert run.stdout.count("|") == 6 * 9  # the heading and five rows
    assert run.stderr.count(" rows/s, loss ") == 2


def test_elastic_digits(run_of):
    run = run_of("elastic_spark.py")
    assert run.returncode == 0, run.stderr
    *lines, verdict = run.stdout.splitlines()
    [epoch] = [line for line in lines if ">:epoch" in line]  # ranks may say late who they are
    assert re.fullmatch(EPOCH.format(number=" 1", told="   ranks 2"), epoch)
    assert re.fullmatch(AGREE, verdict)


def test_the_script_of_the_launch_files():
    """As ``docs/launch/files/yarn/submit_elastic.sh`` starts it, with another master."""
    script = ROOT / "docs" / "launch" / "files" / "spark" / "train.py"
    submit = [Path(sys.executable).with_name("spark-submit"), "--master", "local[2]"]
    conf = ["--conf", "spark.driver.host=127.0.0.1", "--driver-java-options", JAVA_OPTIONS]
    variables = {"PYTHONPATH": startup.PATH, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    run = subprocess.run(
        [*submit, *conf, script, "--workers", "2", "--fewest", "1", "--epochs", "1"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = re.findall(r"^rank (\d) of 2: norm of the weights (\d\.\d{4})$", run.stdout, re.MULTILINE)
    assert [rank for rank, _ in told] == ["0", "1"]
    assert len({norm for _, norm in told}) == 1
