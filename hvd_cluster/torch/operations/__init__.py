"""Collectives on torch tensors, a module for each family; :mod:`hvd_cluster.torch.mpi_ops` has them all.

:mod:`hvd_cluster.operations` says what the arguments mean, which dtypes there are, and what is raised. For torch:

Tensors may have any strides. A result is contiguous, or channels last as the tensor was. The tensor must not change
before an asynchronous operation is synchronized.

Functions that end in ``_async`` return a handle for ``poll`` and ``synchronize``; those that end in ``_`` or
``_async_`` work in place. Neither records anything for autograd. All others do, and backward is a collective as well,
see :mod:`hvd_cluster.operations.gradients`: ranks that differ in whether a tensor requires a gradient wait for each
other in vain.
"""
