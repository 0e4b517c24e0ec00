"""fabric: RDMA between nodes, and what NCCL is told about it."""
