"""munge: one key by which the nodes' daemons know each other."""
