"""Grafana dashboards, generated from the exporter's own table of metrics."""
