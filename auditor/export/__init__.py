"""What others may look at: metrics for Prometheus, an API for people and programs."""
