"""tests.hvd_cluster.core"""
