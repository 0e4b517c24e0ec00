"""nvidia: driver, CUDA and what belongs to them, from one lock; what mode the GPUs are in."""
