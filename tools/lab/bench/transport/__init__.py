"""Benchmarks of the transport: the table of all of it, TCP stripes, RDMA, frames, an idle rank's wake-ups."""
