"""Join a job and print its members. Run it: zbmd-node run -n 3 examples/join.py"""

import zbmd


async def main() -> None:
    async with zbmd.join() as worker:
        view = await worker.view(after=0)
        print(f"rank {worker.rank} of {worker.world_size}, epoch {view.epoch}, with {list(view.ranks)}")


zbmd.run(main())
