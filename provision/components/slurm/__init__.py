"""slurm: the scheduler: accounting, controller, workers, REST."""
