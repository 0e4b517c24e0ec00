"""dcgm_exporter: what NVIDIA DCGM says of GPUs, for Prometheus."""
