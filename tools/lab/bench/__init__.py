"""Benchmarks of zbmd's own parts: what a design decision of a layer costs, layer by layer."""
