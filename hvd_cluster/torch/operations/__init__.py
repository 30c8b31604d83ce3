"""Collectives on torch tensors, a module for each family; :mod:`hvd_cluster.torch.mpi_ops` has them all.

Arguments mean the same everywhere:

``name``
    keys the operation across ranks: ranks submit in any order, equal names meet. Without one, the n-th unnamed
    operation of a kind on each rank meet. A group of ``name`` keys its n tensors as name_1ofn to name_nofn.
``op``
    Average (default), Sum, Min, Max or Product, of the elements of all members; Adasum for allreduce of floats, on a
    power of two of ranks. 16-bit floats are accumulated in float32; an Average of integers is their sum (of less than
    2^63), divided and truncated; of bools, Sum and Max mean any, Min and Product all; complex numbers have Average and
    Sum only.
    ``average=True/False`` is the deprecated form of Average and Sum.
``prescale_factor``, ``postscale_factor``
    multiply each tensor before, and the result after; integers are truncated towards zero.
``compression``
    what tensors are turned into while they travel, such as ``Compression.fp16``.
``process_set``
    the ranks that take part; ``root_rank`` is a global rank all the same.

dtypes: uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128, bool (not averaged
or scaled). Tensors of any strides, 0-d and empty ones work; allgather, alltoall and reducescatter need a first
dimension. A result is contiguous, or channels last as the tensor was. The tensor must not change before an asynchronous
operation is synchronized.

Functions that end in ``_async`` give a handle for ``poll`` and ``synchronize``, those that end in ``_`` or ``_async_``
work in place; neither records anything for autograd. All others do, and backward is a collective, too, with the process
set and, where there is one, the name of the operation, followed by ".backward": ranks that differ in whether a tensor
requires a gradient wait for each other in vain. The gradient of an allreduce is combined with the op of the allreduce;
that of what leads from one rank to many, an allgather or a broadcast, is averaged.

The tensors of a group run together, or none of them. They may differ in dtype; when the ranks disagree about one of
them, all fail, on all ranks.

Raises, here or from ``synchronize``: ValueError for what is wrong on this rank (dtype, splits, a name still in flight);
HorovodInternalError on every member when the ranks disagree (the engine stays usable), when a rank is lost, and before
``init()``.
"""
