"""ssh: the ssh server of every node."""
