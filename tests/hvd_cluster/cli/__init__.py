"""tests.hvd_cluster.cli"""
