"""Memory that a step frees stays with the process for the next step.

malloc of glibc gives freed memory back to the kernel, which hands it out again page by page, and clears each page. An
optimizer with temporary arrays spends up to a third of its time on that.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MOST_BYTES = 1 << 30
"""The most freed memory, in bytes, that a rank keeps at the end of its heap."""
SHARE = 16
"""The ranks of a host together keep at most one of so many parts of its memory."""
LARGEST_ARRAY = 1 << 27
"""In bytes. Larger arrays have pages of their own, which always go back: as holes in the heap they could not."""
# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
OWN = ("mmap_threshold", "trim_threshold")


def kept_bytes(environment: Mapping[str, str], host_bytes: int, local_size: int) -> int:
    """The freed memory that a rank may keep, in bytes; 0 where the user has set the thresholds of malloc."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(f"glibc.malloc.{name}" in tunables or f"MALLOC_{name.upper()}_" in environment for name in OWN):
        return 0
    return min(MOST_BYTES, host_bytes // SHARE // max(1, local_size))


def keep_freed_memory(environment: Mapping[str, str], local_size: int) -> bool:
    """Set the malloc of this process, for all its threads and for good. False where there is no such malloc."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept = kept_bytes(environment, host_bytes, local_size)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if not kept or set_option is None:
        return False
    return bool(set_option(MMAP_THRESHOLD, min(kept, LARGEST_ARRAY)) and set_option(TRIM_THRESHOLD, kept))
