"""What runs inside the jobs of a campaign: drivers, the training of each worker, and the traps at named points."""
