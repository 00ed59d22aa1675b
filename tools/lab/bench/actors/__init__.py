"""Benchmarks of the actor layer: capture, heartbeats, the watchdog, a host that joins."""
