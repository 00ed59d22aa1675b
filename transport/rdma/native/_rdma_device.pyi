from typing import Final

ROCE_V1: Final[int]
ACTIVE: Final[int]

class Device:
    """An opened device, with a protection domain of its own. It goes with the last object made of it."""

    name: str
    def __init__(self, name: str) -> None:
        """Raises UserError if it cannot be opened."""
    def port(self, number: int) -> tuple[int, int, int, int]:
        """Its state, active MTU (as ibv_mtu), LID, and the longest message, bytes."""
    def gids(self) -> list[tuple[int, int, int, bytes]]:
        """Port, index, type and the 16 bytes of each address."""
    def look_up(self, path: Path) -> int:
        """Find who has the peer's address: 0, or an errno; ETIMEDOUT if nobody answers in a second."""
    def register(
        self, address: int, nbytes: int, *, remote_read: bool = False, remote_write: bool = False
    ) -> Registration:
        """Raises UserError, mostly because too little memory may be locked."""
    def register_dmabuf(
        self,
        descriptor: int,
        offset: int,
        nbytes: int,
        address: int,
        *,
        remote_read: bool = False,
        remote_write: bool = False,
    ) -> Registration:
        """`nbytes` of a dma-buf from `offset` on, which requests name by `address`: both as far into a page.

        The descriptor may be closed then. Raises DmaBufRefused.
        """

class Registration:
    """Memory that a device may touch, until this object is gone. Its holder keeps the memory."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def key(self) -> int:
        """For peers; 0 once it is revoked."""
    def revoke(self) -> None:
        """Once this returns, the device touches the memory no more. Idempotent. Raises UserError."""

class Path:
    """The way from a queue pair of ours to one of a peer: see `rdma_port.PortAt.path_to`."""

    def __init__(
        self,
        gid: bytes,
        *,
        number: int,
        first_psn: int,
        own_psn: int,
        lid: int,
        mtu: int,
        port: int,
        gid_index: int,
        timeout: int,
        retries: int,
    ) -> None:
        """gid: the 16 bytes of the peer's address; the times and tries as in ibv_modify_qp(3).

        Raises LocalProtocolError if they are not 16.
        """
