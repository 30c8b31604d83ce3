"""Memory that a step frees and the next one uses again."""

import os
import subprocess
import sys

import pytest

from hvd_cluster.core.memory import kept_bytes, usable_bytes

GB = 1 << 30
STEPS = 10
ARRAY_BYTES = 24 << 20
PAGES = 3 * ARRAY_BYTES // 4096
SCRIPT = f"""
import resource
from hvd_cluster.core import basics
basics.init()

def step():
    return [b"x" * {ARRAY_BYTES} for _ in range(3)]

step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // {STEPS})
"""


@pytest.mark.parametrize(
    ("environment", "host_bytes", "local_size", "kept"),
    [
        ({}, 24 * GB, 2, 24 * GB // 32),
        ({}, 512 * GB, 8, GB),
        ({}, 64 * GB, 0, GB),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128"}, 24 * GB, 2, 0),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.mmap_threshold=128"}, 24 * GB, 2, 0),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}, 512 * GB, 2, GB),
        ({"MALLOC_TRIM_THRESHOLD_": "128"}, 24 * GB, 2, 0),
        ({"MALLOC_ARENA_MAX": "4"}, 512 * GB, 2, GB),
    ],
)
def test_the_memory_that_a_rank_may_keep(environment, host_bytes, local_size, kept):
    assert kept_bytes(environment, host_bytes, local_size) == kept


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container_may_have_less_memory_than_its_host(tmp_path, name):
    host = usable_bytes(tmp_path)
    assert host > 1 << 20
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text, found in (("1048576\n", 1 << 20), ("max\n", host), (f"{1 << 62}\n", host)):
        (tmp_path / name).write_text(text)
        assert usable_bytes(tmp_path) == found


def faults(**variables):
    environment = {**os.environ, "GLIBC_TUNABLES": "", **variables}
    command = [sys.executable, "-c", SCRIPT]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout)


def test_pages_of_a_step_are_used_again():
    """The kernel hands out no new ones; with malloc's own thresholds, all of them again in each step."""
    assert faults() < PAGES / 10
    assert faults(HVD_KEEP_FREED_MEMORY="0") > PAGES / 2
