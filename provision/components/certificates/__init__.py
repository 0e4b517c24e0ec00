"""certificates: an authority of the cluster's own, and a certificate for every node."""
