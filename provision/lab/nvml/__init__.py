"""What stands for the NVIDIA driver on nodes of the lab; its programs run there, by the node's Python."""
