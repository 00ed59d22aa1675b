from zbmd.transport.rdma.native._rdma_device import Device, Path

class BeatEnd:
    """A queue pair, and memory for the newest heartbeat of a peer, who writes it there.

    Raises `UserError` if the device gives none. After `close` every other method raises `LocalProtocolError`.
    """

    def __init__(self, device: Device) -> None: ...
    @property
    def number(self) -> int:
        """Of the queue pair."""

    @property
    def address(self) -> int:
        """The address in our memory to which the peer writes."""

    @property
    def key(self) -> int:
        """By which it may."""

    @property
    def status(self) -> int:
        """Of the first write that has failed, as ibv_wc_status; 0 while none has."""

    def connect(self, path: Path, *, address: int, key: int) -> None:
        """To where the peer is; address, key: of its memory for our beats. Raises `UserError`."""

    @property
    def way(self) -> object:
        """For `NativeHeartbeats.add_way`. It is good until `close`."""

    def close(self) -> None:
        """Nothing is written any more on either side. The route has been given back. Idempotent."""
