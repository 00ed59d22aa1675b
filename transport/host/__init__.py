"""Facts of this host, and choices that follow from them.

`topology` reads processors, devices and interfaces; `link_choice` and `rdma_device_choice` decide how two
hosts are linked, as pure functions. Imports `errors` alone. Begin with `facts`.
"""
