"""tests.hvd_cluster"""
