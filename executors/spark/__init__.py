"""Workers beside the tasks of a barrier stage of Spark.

::

    session.py     classic or Connect: settings, slots, tags
    slots.py       pure: do the workers fit, and what to say where they do not
    frame.py       a DataFrame in as many partitions as workers
    plan.py        what travels to the tasks, and back
    job.py         the driver's side: starts the stage, waits, collects outcomes
    console.py     the driver's end of the lines from the tasks: shows output, notices losses
    display.py     shows output in a thread of its own
    line.py        the task's end
    meeting.py     tasks find each other: places -> ranks -> rendezvous
    task.py        one task: it meets the others, feeds its worker, and yields the outcome as rows
    worker.py      the worker process, and what the tasks tell each other about its end
    reason.py      pure: what a person reads of an error of Spark
    feeding.py     how rows come from a task into its worker
"""

try:
    import pyspark as pyspark
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    raise ImportError(
        'hvd_cluster.spark needs PySpark, which is not installed: pip install "hvd-cluster[spark]"'
    ) from error
