"""Jobs, sessions and devices for the tests of RDMA."""
