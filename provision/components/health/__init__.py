"""The node agent: put on the nodes, told what the site expects, called by timer and scheduler."""
