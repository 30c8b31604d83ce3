"""tests.hvd_cluster.data"""
