"""Links and memory over RDMA verbs.

`connect` sets up links to other hosts, by RDMA where both sides have it and TCP elsewhere; `link` and
`message_device` carry frames by pyverbs; `plane` and `peer` move memory by libibverbs (`native`). Both
libraries are imported when they are first used. Imports `tcp`, `bulk` and `cuda.api`. Begin with `connect`.
"""
