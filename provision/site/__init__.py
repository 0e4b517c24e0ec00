"""What the admin wrote: one YAML file that describes one cluster."""
