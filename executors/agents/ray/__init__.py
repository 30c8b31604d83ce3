"""Workers as Ray actors in a placement group.

::

    settings.py          how long to wait, which interfaces; validated and frozen
    request.py           pure: the user's request -> bundles and strategy
    shortage.py          pure: a request and the state of a cluster -> the missing resources
    outlook.py           pure: whether a request that does not fit may fit later
    connection.py        is this process connected to a cluster, and still to the same one
    placement_group.py   reserves the bundles, or reuses the caller's group
    keeper.py            takes back the group, or the request to the autoscaler, of a process that is killed
    call.py              a call, in the object store
    datasets.py          the parts of datasets of Ray Data, by rank
    worker.py            the actor: location, environment, executable, running functions
    group.py             the actors of a job: start, call, end
    waiting.py           waits for a result of every rank; the first failure ends the wait
    job.py               one running job, with all of these parts
    deputy.py            the actor that drives a job of a client outside of the cluster
    client.py            the side of that client
    train.py             the backend of Ray Train, which starts and ends the actors itself
"""

try:
    import ray as ray
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError('RayExecutor needs Ray, which is not installed: pip install "hvd-cluster[ray]"') from error
