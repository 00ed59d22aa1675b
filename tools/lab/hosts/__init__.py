"""Hosts as network namespaces, joined by a switch; jobs and clusters on them, and hosts that are killed."""
