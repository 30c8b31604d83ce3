"""The job that is attacked: ``training.py FOLDER STEPS``, an elastic loop of NumPy, whose values each rank checks.

A worker appends to ``FOLDER/<worker>`` a line of JSON for each step: its number, the number of ranks, and how long it
took. A wrong value ends the job with an error.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from collectives import Operation
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.elastic import ObjectState, run
from hvd_cluster.ops import submission
from hvd_cluster.ops.arrays import in_place

ELEMENTS = 50_000
STEP_SECONDS = 0.005


@run
def train(state, log, steps):
    while state.steps < steps:
        begin = time.perf_counter()
        size, values = basics.size(), np.arange(ELEMENTS, dtype=np.float64) + state.steps
        combined = values * (basics.rank() + 1)
        submission.run(Operation.ALLREDUCE, in_place, combined, "values", global_process_set)
        if not np.array_equal(combined, values * (size * (size + 1) / 2)):
            raise ValueError(f"step {state.steps} of {size} ranks has a wrong result")
        seconds = time.perf_counter() - begin
        log.write(json.dumps({"step": state.steps, "size": size, "seconds": seconds}) + "\n")
        log.flush()
        time.sleep(STEP_SECONDS)  # the computation
        state.steps += 1
        state.commit()


def main():
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    basics.init()
    with (folder / f"worker-{os.getpid()}").open("a") as log:
        train(ObjectState(steps=0), log, steps)


if __name__ == "__main__":
    main()
