"""``python -m hvd_cluster.tensorflow.data.compute_worker CONFIGFILE``: a data service on the ranks of a job.

::

    hvdrun -np 4 python -m hvd_cluster.tensorflow.data.compute_worker /shared/service.json --dispatchers 2
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, NoReturn

from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object
from hvd_cluster.tensorflow.data.compute_service import compute_worker_fn
from hvd_cluster.tensorflow.data.config import ServiceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the service ends, and return the exit code. Raises the errors of ``compute_worker_fn``."""
    parser = ServiceOptions.parser("hvdrun ... python -m hvd_cluster.tensorflow.data.compute_worker")
    options = ServiceOptions(**vars(parser.parse_args(argv)))
    # The launcher asks rank 0 to end when another rank has died. It must not end before it has told the readers.
    signal.signal(signal.SIGTERM, _leave)
    basics.init()
    with ExitStack() as stack:
        stack.callback(basics.shutdown)
        config: Any = None  # until rank 0 sends its own
        if basics.rank() == 0:
            service, config = options.service(basics.size())
            stack.enter_context(service)
        compute_worker_fn(broadcast_object(config, name="TfDataServiceConfig"))
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
