"""Workers as processes of this host: a command or a function on each of a number of ranks."""
