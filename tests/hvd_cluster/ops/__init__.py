"""tests.hvd_cluster.ops"""
