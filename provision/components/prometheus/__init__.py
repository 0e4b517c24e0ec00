"""prometheus: monitoring: exporters, server, alerts."""
