"""``python -m hvd_cluster.diagnose``: what works on this machine, and why the rest does not."""
