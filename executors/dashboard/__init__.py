"""The live page of a job, served by its driver."""
