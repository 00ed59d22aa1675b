"""Laboratories: an emulated RDMA machine, networks of namespaces, GPU checks, proofs, own benchmarks.

Not in the wheel. May import what ships, and `chaos`. Each sub-package has its own command; CONTRIBUTING.md
lists them.
"""
