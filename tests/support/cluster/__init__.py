"""Nodes of a cluster, as processes and as threads."""
