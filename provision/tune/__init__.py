"""Measures what NCCL could be told of the network, and proposes what proved better for the site file."""
