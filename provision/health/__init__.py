"""The node agent: reads a node, judges what it read, remembers, acts. Standard library and nvidia-ml-py alone."""
