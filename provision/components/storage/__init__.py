"""storage: what all nodes share, and each node's own scratch."""
