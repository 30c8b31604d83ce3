"""Where the workers of a job live, for each kind of job: processes of hosts, actors of Ray, tasks of Spark, ranks of
MPI.
"""
