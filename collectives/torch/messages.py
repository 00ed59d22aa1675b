"""Point-to-point messages of a process group: on the loop, beside the queue of its collectives."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec

from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.group.group import Group
from zbmd.collectives.p2p.differing import CALLS_DIFFER, message_differs
from zbmd.collectives.p2p.direct import DirectMessages
from zbmd.collectives.p2p.tagged import within
from zbmd.collectives.p2p.wire import TaggedMessage
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.cuda.calls import DeviceCalls, DeviceMessages, DeviceWork, chained
from zbmd.collectives.torch.cuda.companions import (
    MESSAGES,
    Companions,
    device_type_of,
    is_passed_on,
    pass_on,
)
from zbmd.collectives.torch.cuda.devices import DeviceBuffer, buffer_of
from zbmd.collectives.torch.flights import label, profiled
from zbmd.collectives.torch.identity import Identity, Unmade
from zbmd.collectives.torch.tensors import Array, TensorBuffer, only
from zbmd.collectives.torch.work import DONE, MessageWork, Work, as_torch_error
from zbmd.collectives.torch.world import world
from zbmd.transport.errors import UserError, ZbmdError

torch: Any = importlib.import_module("torch")

CallP = ParamSpec("CallP")


async def send(group: Group, array: Array, text: str, to: int, tag: int, timeout_s: float) -> None:
    """Send a tensor's array to rank `to` of the group; see `Group.send`. text: of the tensor."""
    async with within(timeout_s, f"send({text}, dst={to}, tag={tag})"):
        await group.messages().send(array, group.members[to], tag, label=text)


async def receive(
    group: Group, buffer: TensorBuffer, array: Array, source: int | None, tag: int, timeout_s: float
) -> int:
    """Receive a tensor's array from a rank of the group, None from any; return the sender.

    Raises `Desynchronised` if the sender's tensor is of another dtype or size, after which the group is of no
    use: the sender's next call fails with that.
    """
    call = f"recv({buffer.text}, {'' if source is None else f'src={source}, '}tag={tag})"

    def check(message: TaggedMessage, member: int) -> None:
        sender, sent = group.members.index(member), message.label
        if not sent or (_dtype_of(sent) == _dtype_of(buffer.text) and message.nbytes == array.nbytes):
            return
        theirs = f"send({sent}, dst={group.rank}, tag={tag})"
        raise message_differs({group.rank: call, sender: theirs}, group.members)

    try:
        async with within(timeout_s, call):
            member = None if source is None else group.members[source]
            got = await group.messages().receive(member, tag, array, check)
    except Desynchronised as error:
        await asyncio.to_thread(group.give_up, f"{CALLS_DIFFER}{error}")
        raise
    buffer.bring_home()
    return group.members.index(got.source)


def _dtype_of(label: str) -> str:
    return label.partition("[")[0]


def raising(call: Callable[CallP, Any]) -> Callable[CallP, Any]:
    """Have a call raise an error of ours, about an argument, as torch's users expect it.

    One with tensors of a device that has a backend beside ours goes to that.
    """

    @wraps(call)
    def raising(*args: CallP.args, **kwargs: CallP.kwargs) -> Any:
        try:
            group: Any = args[0]
            if group.companions is not None and is_passed_on(call.__name__):
                work = group.pass_on(call.__name__, args[1:], kwargs)
                if work is not None:
                    return work
            return call(*args, **kwargs)
        except ZbmdError as error:
            if not CONTINUITY.is_beside:  # whose loss may be of an epoch that is over
                CONTINUITY.note(error)
            raise as_torch_error(error) from error

    return raising


class Messages(Identity):
    """The methods of a process group that send and receive."""

    _completers: ThreadPoolExecutor
    _together: list[Future[Any]] | None

    def __init__(
        self, group: Group | Unmade, store: Any, timeout_s: float, name: str, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(group, store, timeout_s, name, ranks)
        self.device_calls = DeviceCalls()
        self._device_messages = DeviceMessages(self.device_calls)

    def rebind(self, made: Group) -> None:
        """See `Identity.rebind`."""
        super().rebind(made)
        self.device_calls.failure = None
        if self.companions is not None:
            self.join_beside(self.companions)

    def join_beside(self, companions: Companions) -> None:
        """Have these backends take the tensors of their devices, in the epoch of the group, if it is made."""
        self.companions, made = companions, self.made
        if made is not None:
            store = CONTINUITY.store or self._store
            companions.made(made.epoch, store, self.limit_s, rank=made.rank, size=made.size)

    def pass_on(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the work of a backend beside ours; None if the call is not for one, or is local now."""
        if self.companions is None or CONTINUITY.is_alone:
            return None
        backend = self.companions.backend(device_type_of(args))
        if backend is None:
            return None
        if name not in MESSAGES:
            self._calls += 1  # as a replacement counts it, for which it is local
        return pass_on(backend, name, args, kwargs)

    companions: Companions | None = None
    """The backends beside ours, of `cpu:zbmd,cuda:nccl`."""

    @raising
    def send(self, tensors: Any, dst: int, tag: int, limit_ns: int | None = None) -> Any:
        """Send a tensor to one rank. limit_ns: for the operation; None is the group's."""
        buffer, to = buffer_of(only(tensors)), self._rank(dst)
        if CONTINUITY.is_alone:
            return self._work(DONE, [])
        if profiled():
            with label("send", [only(tensors)]):
                pass  # a mark: it has no length
        limit_ns, direct = self._timeout_ns if limit_ns is None else limit_ns, self._direct()
        if isinstance(buffer, DeviceBuffer):

            def sent(array: Array) -> Future[Any]:
                return self._sent(buffer, array, to, tag, limit_ns)

            on, done = self._device_messages.send(buffer, to, sent)
            return self._keep(DeviceWork(done, [], self._completers, on), done)
        if direct is not None:
            request = direct.send(buffer.array, to, tag, buffer.label, limit_ns)
            return self._message_work(MessageWork(direct, request, self._completers))
        return self._work(self._sent(buffer, buffer.array, to, tag, limit_ns), [])

    def _sent(self, buffer: TensorBuffer, array: Array, to: int, tag: int, limit_ns: int) -> Future[Any]:
        """Send an array for the tensor of a buffer; return when it is sent."""
        direct = self._direct()
        if direct is not None:
            request = direct.send(array, to, tag, buffer.label, limit_ns)
            done: Future[Any] = MessageWork(direct, request, self._completers).future()
            return done
        return world().start(send(self._group, array, buffer.text, to, tag, limit_ns / 1e9))

    @raising
    def recv(self, tensors: Any, src: int, tag: int, limit_ns: int | None = None) -> Any:
        """Receive a tensor from one rank. limit_ns: for the operation; None is the group's."""
        return self._receive(only(tensors), src, tag, limit_ns)

    @raising
    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """Receive a tensor from whichever rank sends first."""
        return self._receive(only(tensors), None, tag)

    def _receive(self, tensor: Any, src: int | None, tag: int, limit_ns: int | None = None) -> Any:
        buffer, source = buffer_of(tensor, load=False), None if src is None else self._rank(src)
        if CONTINUITY.is_alone:
            return self._work(DONE, [tensor])
        if profiled():
            with label("recv" if source is not None else "recvAnySource", [tensor]):
                pass
        limit_ns, direct = self._timeout_ns if limit_ns is None else limit_ns, self._direct()
        if isinstance(buffer, DeviceBuffer):

            def received(array: Array) -> Future[int]:
                return self._received(buffer, array, source, tag, limit_ns)

            on, done = self._device_messages.receive(buffer, received)
            return self._keep(DeviceWork(done, [tensor], self._completers, on, done.result), done)
        if direct is not None:
            request = direct.receive(buffer.array, source, tag, buffer.label, limit_ns)
            return self._message_work(MessageWork(direct, request, self._completers, tensor, buffer))
        got = self._received(buffer, buffer.array, source, tag, limit_ns)
        return self._work(got, [tensor], got.result)

    def _received(
        self, buffer: TensorBuffer, array: Array, source: int | None, tag: int, limit_ns: int
    ) -> Future[int]:
        """Receive an array for the tensor of a buffer; return the rank that sent when it is there."""
        direct = self._direct()
        if direct is None:
            return world().start(receive(self._group, buffer, array, source, tag, limit_ns / 1e9))
        request = direct.receive(array, source, tag, buffer.label, limit_ns)
        over: Future[Any] = MessageWork(direct, request, self._completers).future()
        return chained(over, lambda _: int(request.source))

    def _direct(self) -> DirectMessages | None:
        self._group.check_process()
        direct: DirectMessages | None = self._group.direct
        return direct

    def _message_work(self, work: Any) -> Any:
        if self._together is not None:
            self._together.append(work.future())
        self._kept.append(work)
        return work

    def _keep(self, work: Any, done: Future[Any]) -> Any:
        """Return a work, with those that are waited for together, and kept for C++."""
        if self._together is not None:
            self._together.append(done)
        self._kept.append(work)
        return work

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self._group.size:
            raise UserError(f"rank {rank} is not in 0..{self._group.size - 1}, the ranks of this group")
        return rank

    def _work(
        self, done: Future[Any], outputs: Sequence[Any], source: Callable[[], int] | None = None
    ) -> Any:
        """Return a work of what has begun."""
        return self._keep(Work(done, outputs, self._completers, source), done)
