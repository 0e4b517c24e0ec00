"""logs: every node's journal on one node, and questions to all of them at once."""
