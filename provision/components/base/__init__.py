"""base: what every node has before anything else is installed on it."""
