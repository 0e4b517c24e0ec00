"""containers: Docker, Podman, Apptainer, Enroot and Pyxis, with GPUs by CDI."""
