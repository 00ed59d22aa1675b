"""Join the job and say who is there. Run it: zbmd-node run -n 3 examples/join.py"""

import zbmd


async def main() -> None:
    async with zbmd.join() as node:
        view = await node.view(after=0)
        print(f"rank {node.rank} of {node.world_size}, epoch {view.epoch}, with {list(view.ranks)}")


zbmd.run(main())
