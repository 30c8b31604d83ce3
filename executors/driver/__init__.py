"""The driver of a job: executes what the membership decides."""
