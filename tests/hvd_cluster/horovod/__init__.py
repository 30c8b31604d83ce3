"""tests.hvd_cluster.horovod"""
