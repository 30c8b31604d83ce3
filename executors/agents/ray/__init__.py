"""Workers as Ray actors in a placement group.

A job (``job``) has a group of actors (``group``, ``worker``), and each call on them is a static job
(``call_on_ranks``). In an elastic job (``elastic``) the actors come and go one by one (``actors``). A client outside of
the cluster (``client``) has a ``remote_driver`` in it. ``placement/`` says where actors may be; ``train/`` serves Ray
Train, which starts its workers itself.
"""

try:
    import ray as ray
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError('RayExecutor needs Ray, which is not installed: pip install "hvd-cluster[ray]"') from error
