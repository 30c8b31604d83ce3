"""``python -m hvd_cluster.diagnose``: the backends that work on this machine, and the reasons why others do not."""
