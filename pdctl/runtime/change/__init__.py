"""What happens to a running cluster: drain, restart, another topology."""
