"""What jobs of every kind have: store, secret, environment, hosts, arguments, loop, connections."""
