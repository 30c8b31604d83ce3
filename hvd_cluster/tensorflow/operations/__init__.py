"""Collectives on TensorFlow's tensors, a module for each family; :mod:`hvd_cluster.tensorflow.mpi_ops` has them all.

:mod:`hvd_cluster.ops` describes the arguments and the dtypes. For TensorFlow:

The functions work in eager mode, in a ``tf.function`` and in graphs of ``tf.compat.v1``. In a graph the operations of a
run travel at the same time, in any order, and fuse. Each has a gradient, see :mod:`hvd_cluster.ops.backward`.

Without ``name``, the calls of eager mode are numbered; a node of a graph is named after its tensors. If a graph has
several nodes of one name, they have numbers, as TensorFlow gives them: ranks that trace the same function have the same
names. ``ignore_name_scope`` leaves the name scopes out, for ranks that trace it in different ones.

Wrong arguments raise ValueError. A failure of a running operation is an error of TensorFlow: FailedPrecondition when
the ranks disagree, InvalidArgument, Unknown when a rank is lost or the job has ended, Aborted.
``hvd_cluster.tensorflow.errors.engine_error`` returns the engine's own exception for it.
"""
