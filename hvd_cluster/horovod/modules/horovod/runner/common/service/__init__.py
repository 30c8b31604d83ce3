"""Services between the processes of a job."""
