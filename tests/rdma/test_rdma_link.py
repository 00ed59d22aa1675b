"""The promises of every transport's links, over RDMA: the suites of `tests/transport`, on real devices."""

from __future__ import annotations

from support.links.link_harness import Ear, Net
from support.rdma.rdma_harness import RdmaHarness


def test_frames_go_both_ways() -> None:
    async def scenario(net: Net) -> None:
        a, b = await net.connect()
        ears = Ear(a), Ear(b)
        a.send(b"there")
        assert await ears[1].frames(1) == [b"there"]
        b.send(bytes(100_000))
        assert await ears[0].frames(1) == [bytes(100_000)]
        a.close()
        assert await ears[1].end() is None

    RdmaHarness("uvloop").run(scenario)
