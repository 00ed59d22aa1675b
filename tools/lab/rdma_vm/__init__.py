"""A virtual machine with RDMA devices in software (soft-RoCE), for tests where there is no RDMA hardware."""
