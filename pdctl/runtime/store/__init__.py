"""The process of one host's page store: `python -m pdctl.runtime.store`, started by the agent."""
