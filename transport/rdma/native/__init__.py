"""The package `native` of `zbmd.transport.rdma`."""
