"""The dashboards of a run, generated from the metric declarations: `make dashboards`."""
