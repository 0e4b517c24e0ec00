"""slurm_exporter: what Slurm says of nodes, jobs, GPUs and its scheduler, for Prometheus."""
