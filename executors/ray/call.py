"""A call, once in the object store for all workers."""

from __future__ import annotations

import ray
from ray import ObjectRef

from executors.call import Call, refusal

__all__ = ["store"]


def store(call: Call) -> ObjectRef[Call]:
    """Put ``call`` into the object store, where all workers of a node share one copy of its arrays.

    Raises TypeError that names the function when it cannot be pickled.
    """
    try:
        return ray.put(call)
    except Exception as error:
        raise refusal(call, error.__cause__ or error, ray.cloudpickle.dumps) from error
