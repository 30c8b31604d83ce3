"""Workers beside the tasks of a barrier stage of Spark."""
