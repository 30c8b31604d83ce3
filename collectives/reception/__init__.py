"""How every server of ours accepts connections, and limits those that have not shown that they know the secret."""
