"""Imported last by a process that others are forked from: the garbage collector of them skips what is there by then.

The frameworks have a million objects. A collection that looks at all of them takes half a second.
"""

import gc

gc.collect()
gc.freeze()
