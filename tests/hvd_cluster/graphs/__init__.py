"""tests.hvd_cluster.graphs"""
