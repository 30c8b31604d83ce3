"""The parts of collectives that are the same in every framework.

A binding describes a tensor as a ``submission.Operand`` and passes it on; ``arguments`` checks the other arguments of
the user, ``submission`` turns them into a request of the engine and returns a handle, and ``backward`` has the rules of
backward.

Arguments mean the same everywhere:

``name``
    keys the operation across ranks: ranks submit in any order, and equal names are matched. Without a name, the n-th
    unnamed operations of a kind on all ranks are matched. A group of ``name`` keys its n tensors as name[0] to
    name[n-1].
``op``
    Average (default), Sum, Min, Max or Product, of the elements of all members; Adasum for allreduce of floats, on a
    power of two of ranks. 16-bit floats are accumulated in float32; an Average of integers is their sum (of less than
    2^63), divided and truncated; of bools, Sum and Max mean any, Min and Product all; complex numbers have Average and
    Sum only.
    ``average=True/False`` is the deprecated form of Average and Sum.
``prescale_factor``, ``postscale_factor``
    multiply each tensor before, and the result after; integers are truncated towards zero.
``compression``
    how tensors are converted while they travel, such as ``Compression.fp16``.
``process_set``
    the ranks that take part; ``root_rank`` is a global rank all the same.

dtypes: uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128, bool (not averaged
or scaled). 0-d and empty tensors work; allgather, alltoall and reducescatter need a first dimension.

The tensors of a group run together, or none of them. They may differ in dtype; when the ranks disagree about one of
them, all fail, on all ranks.

An operation, or the synchronization of its handle, raises ValueError for a wrong argument of this rank (dtype, splits,
a name still in flight); HorovodInternalError on every member when the ranks disagree (the engine stays usable), when a
rank is lost, and before ``init()``.
"""
