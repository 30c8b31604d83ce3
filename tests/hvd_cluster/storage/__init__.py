"""tests.hvd_cluster.storage"""
