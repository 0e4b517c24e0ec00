"""time: one clock for the whole cluster."""
