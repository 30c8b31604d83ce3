"""Jobs whose workers are processes of hosts: a command or a function on each of a number of ranks."""
