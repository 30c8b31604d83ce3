"""tests.hvd_cluster.reports"""
