"""`dist.breakpoint` in one of the ranks."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from programs.torch.backend.common import dist

dist.init_process_group("zbmd")
dist.breakpoint(0)
print("rank", dist.get_rank(), "went on", flush=True)
dist.destroy_process_group()
