"""Training in Spark's own executors, next to the data."""
