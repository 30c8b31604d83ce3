"""Workers beside the tasks of a barrier stage of Spark.

::

    session.py     classic or Connect: settings, slots, tags
    slots.py       pure: whether the workers fit, and the error if they do not
    frame.py       a DataFrame in as many partitions as workers
    plan.py        the data for all tasks
    broadcasts.py  broadcast variables to which the function refers: from the task to its worker
    results.py     outcomes as rows, where a task has no connection to the driver
    job.py         the driver's side: starts the stage, waits, collects outcomes
    console.py     the driver's end of the connections from the tasks: shows output, notices losses
    display.py     shows output in a thread of its own
    connection.py  the task's end of such a connection
    rendezvous.py  tasks find each other: locations -> ranks -> rendezvous server
    task.py        one task: finds the others, feeds its worker, yields the outcome as rows
    worker.py      the worker process, and how the tasks coordinate the end of the job
    reason.py      pure: the readable part of an error of Spark
    feeding.py     protocols: how rows get from a task into its worker
"""

try:
    import pyspark as pyspark
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    raise ImportError(
        'hvd_cluster.spark needs PySpark, which is not installed: pip install "hvd-cluster[spark]"'
    ) from error
