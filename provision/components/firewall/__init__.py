"""firewall: a packet filter of our own: the cluster's networks are open, all else by name."""
