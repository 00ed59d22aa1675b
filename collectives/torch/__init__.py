"""The PyTorch backend: `torch.distributed` process groups over groups of zbmd.

`backend` registers it, `process_group` maps torch's calls to a communicator, `work` wraps futures, `world`
joins the job from code without an event loop, `rendezvous` brings its members together for each
`init_process_group`; by `guards` the guards of several hosts meet. The only package of the layer that imports
PyTorch, lazily. Begin with `backend`, then `process_group`.
"""
