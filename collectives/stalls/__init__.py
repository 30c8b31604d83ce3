"""Everything that finds out why ranks wait, and names the ranks that they wait for."""
