"""Horovod's API on Keras 3, whose backend is TensorFlow, torch or JAX: ``import hvd_cluster.keras as hvd``."""
