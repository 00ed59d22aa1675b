"""Benchmarks of collectives: several hosts, calls to remote groups, shrinking, the flight recorder."""
