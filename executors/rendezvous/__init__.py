"""How the ranks of a job find rank 0 where no launcher of ours runs: rank 0 serves, the others look for it."""
