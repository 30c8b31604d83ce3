"""Where the workers of a job on Ray may be: the nodes of the cluster, a placement group, the autoscaler."""
