"""How the ranks of a job find each other: a small signed key-value service in the driver, and its clients."""
