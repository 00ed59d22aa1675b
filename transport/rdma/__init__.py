"""The package `rdma` of `zbmd.transport`."""
