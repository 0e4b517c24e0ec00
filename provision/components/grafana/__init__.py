"""grafana: dashboards of the cluster, provisioned as files."""
