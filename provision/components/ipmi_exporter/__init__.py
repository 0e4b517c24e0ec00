"""ipmi_exporter: what a node's BMC says of fans, power and temperatures, for Prometheus."""
