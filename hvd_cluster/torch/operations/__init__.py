"""Collectives on torch tensors, a module for each family; :mod:`hvd_cluster.torch.mpi_ops` has them all.

:mod:`hvd_cluster.ops` describes the arguments, the dtypes and the errors. For torch:

Tensors may have any strides. A result is contiguous, or channels last as the tensor was. The tensor must not change
before an asynchronous operation is synchronized.

Functions that end in ``_async`` return a handle for ``poll`` and ``synchronize``; those that end in ``_`` or
``_async_`` work in place. None of these records anything for autograd. All other functions do, and their backward is a
collective, too, see :mod:`hvd_cluster.ops.backward`: if a tensor requires a gradient on some ranks only, these
ranks wait in backward for the others, which never come.
"""
