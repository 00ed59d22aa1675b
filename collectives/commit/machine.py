"""Sans-I/O step commit: ranks agree, by vote, that a transactional step has happened.

State has versions; version v is the result of step v. A rank keeps two slots: the committed version and the
one that is being prepared. A step is committed when every member of the epoch has voted for the same digest,
so no rank ever keeps a step that another must undo without having a copy of it.

When a member is lost the epoch ends. In the next one every member reports what it holds; the highest
committed version among them is the group's. A member that is behind promotes its prepared slot if the digest
matches, or else pulls that version from a member that has it. A step that no member had committed is run
again: it is a pure function of the version before it, so a lost commit of a dead rank and the repetition have
the same bits.

A source's slot is stable while it is read, because the source can commit the step after it only with the
reader's vote, and the reader votes only after its pull has ended. An operation that is running when the epoch
ends is drained before the rank reports, since it may still access the slots.

A membership that only adds members, or links them again, costs no step: each vote names the newer epoch that
its sender could enter, and once all votes for a version name one, all enter it after that version. If the
step cannot be committed any more, because a member is lost or has given up, an epoch is entered at once.

A rank that enters after a commit knows what all members of the previous epoch hold, and waits only for the
reports of the others. A new member then pulls the state while the first step is computed by those that have
it (`RunStep.workers`): no work was lost, so nobody waits until the new member can do its part.

A replacement may start after all others have finished and left: they preserved the last version before they
left, so it is read back from there (`Recall`).

The rule is virtual synchrony's (Birman & Joseph 1987) with the flush reduced to one number per member, which
deterministic steps allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, TypeVar, assert_never

from zbmd.actors.view import MemberId
from zbmd.collectives.commit.events import (
    AbortWork,
    Adopted,
    Commit,
    CommitAction,
    CommitEvent,
    EnterEpoch,
    EpochInstalled,
    EpochReady,
    Failed,
    FailureKind,
    Fetch,
    FetchEnded,
    Finished,
    FinishReceived,
    GaveUpReceived,
    Held,
    PeerEnded,
    Preserve,
    Recall,
    RecallEnded,
    ReportReceived,
    RunStep,
    SendFinish,
    SendGaveUp,
    SendReport,
    SendVote,
    StepEnded,
    VoteReceived,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

STORY_EVENTS_MAX = 8
"""Events kept for the message of a protocol error."""

KEPT_MESSAGES_MAX = 4096
"""Reports, votes or finishes kept for this epoch and for those that a peer has seen before us."""


class CommitState(Enum):
    """The state of the machine."""

    WAITING = auto()
    """No usable epoch: none yet, or a member of it is lost."""
    DRAINING = auto()
    """A new epoch is known; work of the one before has not ended yet."""
    REPORTING = auto()
    FETCHING = auto()
    RUNNING = auto()
    VOTING = auto()
    FINISHING = auto()
    """The last version is committed here; waiting for the others to have it."""
    FINISHED = auto()
    FAILED = auto()


PATIENT_STATES = frozenset({CommitState.FETCHING, CommitState.RUNNING, CommitState.VOTING})
"""A step is under way that may yet be committed: a newer epoch waits for that."""

END_STATES = frozenset({CommitState.FINISHED, CommitState.FAILED})
_Message = TypeVar("_Message", ReportReceived, VoteReceived, FinishReceived)


class StepCommit:
    """One rank's side of a run of transactional steps up to version `last_version`.

    `version`, `digest`: the state held at the start; `handle`: where peers read it, opaque here.
    `known_version`: the highest version known to have been committed by the run (from its commit log). The
    members of an epoch may all be one behind it, if the only rank that had committed it died right then: they
    run that step again, to the same bits. If they are further behind, the state is lost.
    """

    def __init__(
        self,
        *,
        rank: int,
        version: int,
        digest: bytes,
        handle: bytes,
        last_version: int,
        known_version: int = 0,
    ) -> None:
        if not 0 <= version <= last_version:
            raise LocalProtocolError(f"rank {rank}: version {version} is not in 0..{last_version}")
        self.rank = rank
        self.state = CommitState.WAITING
        self.epoch = 0
        self.members: tuple[MemberId, ...] = ()
        self.version = version
        self.digest = digest
        self.slot = 0
        self.prepared: tuple[int, bytes] | None = None
        self.last_version = last_version
        self.known_version = known_version
        self.slots_handle = handle
        self._first_version = version
        self._fresh = True
        self._work: Fetch | Recall | RunStep | None = None
        self._ready: EpochReady | None = None
        self._stayed: tuple[int, tuple[MemberId, ...]] = (0, ())
        """The epoch that was entered behind a commit, and the members who did: all of those before."""
        self._lost: set[int] = set()
        self._gave_up: dict[int, int] = {}
        self._reports: dict[tuple[int, int], ReportReceived] = {}
        self._votes: dict[tuple[int, int], VoteReceived] = {}
        self._finishes: dict[tuple[int, int], FinishReceived] = {}
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)

    # ---- the machine contract

    @property
    def work(self) -> Fetch | Recall | RunStep | None:
        """The step, pull or recall in flight."""
        return self._work

    @property
    def missing(self) -> tuple[int, ...]:
        """The members whose report, vote or finish this state waits for, if it is one that waits for them."""
        match self.state:
            case CommitState.REPORTING:
                heard = set(self._senders(self._reports)) | self._implied()
            case CommitState.VOTING:
                assert self.prepared is not None
                version = self.prepared[0]
                heard = {
                    s for (s, v), vote in self._votes.items() if (v, vote.epoch) == (version, self.epoch)
                }
            case CommitState.FINISHING:
                heard = set(self._senders(self._finishes))
            case _:
                return ()
        return tuple(member.rank for member in self.members if member.rank not in heard)

    def follows_commit(self, epoch: int) -> bool:
        """Whether this epoch is entered straight behind a commit, by all members of the one before."""
        return self._stayed[0] == epoch

    def handle(self, event: CommitEvent, *, now_ns: int) -> list[CommitAction]:
        """Take one event, return the actions to perform in order; see `zbmd.transport.machine.Machine`."""
        if self.state in END_STATES:
            return []
        self._story.append(f"{type(event).__name__}@{now_ns}/{self.state.name}")
        return [*self._take(event), *self._enter_if_held_up()]

    def _take(self, event: CommitEvent) -> list[CommitAction]:
        match event:
            case EpochInstalled():
                return self._install(event)
            case EpochReady():
                return self._note_ready(event)
            case GaveUpReceived():
                self._gave_up[event.sender] = max(event.epoch, self._gave_up.get(event.sender, 0))
                return []
            case ReportReceived():
                self._check_held(event)
                self._keep(self._reports, 0, event)
                return self._agree_on_version()
            case VoteReceived():
                self._keep(self._votes, event.version, event)
                return self._count_votes()
            case FinishReceived():
                self._keep(self._finishes, 0, event)
                return self._finish_if_all()
            case FetchEnded():
                return self._fetch_ended(event)
            case RecallEnded():
                return self._recall_ended(event)
            case StepEnded():
                return self._step_ended(event)
            case PeerEnded():
                return self._peer_ended(event)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that no sequence of events may reach."""
        assert 0 <= self.version <= self.last_version
        assert self.prepared is None or self.prepared[0] == self.version + 1, (self.version, self.prepared)
        match self.state:
            case CommitState.FETCHING:
                assert isinstance(self._work, Fetch | Recall) and self._work.epoch == self.epoch
            case CommitState.RUNNING:
                assert isinstance(self._work, RunStep) and self._work.epoch == self.epoch
            case CommitState.DRAINING:
                assert self._work is not None
            case CommitState.VOTING:
                assert self._work is None and self.prepared is not None
            case CommitState.FINISHING | CommitState.FINISHED:
                assert self._work is None and self.version == self.last_version
            case CommitState.WAITING | CommitState.REPORTING | CommitState.FAILED:
                assert self.state is CommitState.FAILED or self._work is None

    # ---- membership

    def _install(self, event: EpochInstalled) -> list[CommitAction]:
        self._check_follows(event)
        self.epoch, self.members = event.epoch, event.members
        self._lost.clear()
        self._reports = self._of_epoch_on(self._reports)
        self._votes = self._of_epoch_on(self._votes)
        self._finishes = self._of_epoch_on(self._finishes)
        if self._work is not None:
            self.state = CommitState.DRAINING
            return [AbortWork(epoch=self._work.epoch, reason=f"epoch {event.epoch} is installed")]
        return self._report()

    def _check_follows(self, event: EpochInstalled | EpochReady) -> None:
        ranks = [member.rank for member in event.members]
        if event.epoch <= self.epoch or self.rank not in ranks or ranks != sorted(set(ranks)):
            raise LocalProtocolError(
                f"rank {self.rank}: epoch {event.epoch} of {ranks} cannot follow epoch {self.epoch}",
                story=tuple(self._story),
            )

    def _note_ready(self, event: EpochReady) -> list[CommitAction]:
        self._check_follows(event)
        if self._ready is not None:
            raise self._misuse(f"epoch {event.epoch} is ready, and {self._ready.epoch} is not entered yet")
        self._ready = event
        return []

    def _enter_if_held_up(self) -> list[CommitAction]:
        """Enter the epoch that is ready, unless the step under way can still be committed."""
        ready = self._ready
        if ready is None or self.state in END_STATES:
            return []
        stay = set(self.members) <= set(ready.members)
        if self.state in PATIENT_STATES and stay and not self._is_incomplete():
            return []
        actions: list[CommitAction] = []
        if stay and self.state is not CommitState.FINISHING:
            actions += [SendGaveUp(to=to, epoch=self.epoch) for to in self._others()]
        if self._work is None:
            self.state = CommitState.WAITING
        elif self.state is not CommitState.DRAINING:
            self.state = CommitState.DRAINING
            actions.append(AbortWork(epoch=self._work.epoch, reason=f"epoch {ready.epoch} is to be entered"))
        self._ready = None
        return [*actions, EnterEpoch(epoch=ready.epoch)]

    def _is_incomplete(self) -> bool:
        """Whether a member of this epoch votes no more."""
        return bool(self._lost) or any(self._gave_up.get(rank) == self.epoch for rank in self._others())

    def _report(self) -> list[CommitAction]:
        self.state = CommitState.REPORTING
        held = Held(
            version=self.version,
            digest=self.digest,
            slot=self.slot,
            handle=self.slots_handle,
            known=self.known_version,
            fresh=self._fresh,
            whole=self.follows_commit(self.epoch),
        )
        self._reports[self.rank, 0] = ReportReceived(sender=self.rank, epoch=self.epoch, held=held)
        sends: list[CommitAction] = [SendReport(to=to, epoch=self.epoch, held=held) for to in self._others()]
        return sends + self._agree_on_version()

    def _peer_ended(self, event: PeerEnded) -> list[CommitAction]:
        if event.member not in self.members or event.member.rank in self._senders(self._finishes):
            return []  # not of this epoch, or it has the last version and may leave: nothing depends on it
        self._lost.add(event.member.rank)
        if self._work is not None and self.state is not CommitState.DRAINING:
            self.state = CommitState.DRAINING
            return [
                AbortWork(epoch=self._work.epoch, reason=f"rank {event.member.rank} lost: {event.reason}")
            ]
        if self.state is CommitState.REPORTING:
            self.state = CommitState.WAITING
        # VOTING and FINISHING go on: what the lost member sent before its end may still arrive.
        return []

    # ---- reports: agree on the version

    def _check_held(self, event: ReportReceived) -> None:
        held, last = event.held, self.last_version
        if not 0 <= held.version <= last or held.known > last or held.slot not in (0, 1):
            raise self._breach(
                f"rank {event.sender} says that it holds version {held.version} in slot {held.slot} and "
                f"knows of {held.known}; the run ends with version {last} and has slots 0 and 1"
            )

    def _agree_on_version(self) -> list[CommitAction]:
        held = {sender: report.held for sender, report in self._senders(self._reports).items()}
        if self.state is not CommitState.REPORTING or len(held.keys() | self._implied()) < len(self.members):
            return []
        target = max(h.version for h in held.values())
        self.known_version = max(self.known_version, *(h.known for h in held.values()))
        if self._may_be_over(held):
            self.state, self.prepared = CommitState.FETCHING, None
            self._work = Recall(epoch=self.epoch, version=self.last_version, slot=1 - self.slot)
            return [self._work]
        return self._adopt(target, held)

    def _implied(self) -> set[int]:
        """The members who hold what we hold, for we have all just committed it: no report says more."""
        stayed = self._stayed[1] if self.follows_commit(self.epoch) else ()
        return {member.rank for member in self.members if member in stayed}

    def _may_be_over(self, held: dict[int, Held]) -> bool:
        """Whether the run may have ended without the members.

        Nobody leaves before all members of its epoch have the last version: so a member that has once gone
        along and has not got it is proof that the run goes on.
        """
        return self.known_version > self._first_version and all(h.fresh for h in held.values())

    def _adopt(self, target: int, held: dict[int, Held]) -> list[CommitAction]:
        """Come to hold `target`, the highest version that a member holds, and go on from there."""
        if target < self.known_version - 1:
            return self._fail(
                FailureKind.STATE_LOST,
                f"version {self.known_version} was committed, but the members hold at most {target}: "
                "every rank that held it is gone",
            )
        digests = {rank: h.digest for rank, h in sorted(held.items()) if h.version == target}
        holders = list(digests)
        digest = digests[holders[0]]
        if set(digests.values()) != {digest}:
            return self._diverged(target, digests)
        if self.version == target:
            return self._next_step(self._workers(held))
        if self.prepared == (target, digest):
            return [self._commit(target, digest, ()), *self._next_step(self._workers(held))]
        source = holders[self.rank % len(holders)]  # spreads several readers over the holders
        self.state, self.prepared = CommitState.FETCHING, None
        self._work = Fetch(
            epoch=self.epoch,
            source=source,
            source_slot=held[source].slot,
            handle=held[source].handle,
            version=target,
            digest=digest,
            slot=1 - self.slot,
        )
        return [self._work]

    def _workers(self, held: dict[int, Held]) -> tuple[int, ...]:
        """Return the ranks that compute the first step of this epoch; all members come to the same."""
        whole = any(h.whole for h in held.values())
        idle = {rank for rank, h in held.items() if whole and h.fresh}
        return tuple(member.rank for member in self.members if member.rank not in idle)

    def _fetch_ended(self, event: FetchEnded) -> list[CommitAction]:
        work = self._end_work(event.epoch, event.version)
        if not isinstance(work, Fetch):
            raise self._misuse("a pull ended, but a step is running")
        if event.digest is None:
            return self._drained()
        if event.digest != work.digest:
            return self._diverged(work.version, {work.source: work.digest, self.rank: event.digest})
        self.version, self.digest, self.slot = work.version, work.digest, work.slot
        self.known_version = max(self.known_version, self.version)
        adopted: list[CommitAction] = [
            Adopted(epoch=work.epoch, version=self.version, digest=self.digest, slot=self.slot)
        ]
        if self.state is not CommitState.FETCHING:
            return adopted + self._drained()
        held = {sender: report.held for sender, report in self._senders(self._reports).items()}
        return adopted + self._next_step(self._workers(held))

    def _recall_ended(self, event: RecallEnded) -> list[CommitAction]:
        work = self._end_work(event.epoch, event.version)
        if not isinstance(work, Recall):
            raise self._misuse("a recall ended, but other work is in flight")
        actions: list[CommitAction] = []
        if event.digest is not None:
            self.version, self.digest, self.slot = work.version, event.digest, work.slot
            self.known_version = self.version
            actions.append(
                Adopted(epoch=work.epoch, version=self.version, digest=self.digest, slot=self.slot)
            )
        if self.state is not CommitState.FETCHING:
            return actions + self._drained()
        if event.digest is not None:
            return actions + self._next_step()
        held = {sender: report.held for sender, report in self._senders(self._reports).items()}
        return self._adopt(max(h.version for h in held.values()), held)

    # ---- steps and votes

    def _next_step(self, workers: tuple[int, ...] = ()) -> list[CommitAction]:
        """Begin the next step, or the end. workers: who computes it, if not all members do."""
        self._fresh = False
        if self.version < self.last_version:
            self.state, self.prepared = CommitState.RUNNING, None
            ranks = tuple(member.rank for member in self.members)
            self._work = RunStep(
                epoch=self.epoch,
                version=self.version + 1,
                slot=1 - self.slot,
                members=ranks,
                workers=workers or ranks,
            )
            return [self._work]
        self.state = CommitState.FINISHING
        self._finishes[self.rank, 0] = FinishReceived(sender=self.rank, epoch=self.epoch)
        lowest = self.members[0].rank == self.rank
        actions: list[CommitAction] = [Preserve(version=self.version)] if lowest else []
        actions += [SendFinish(to=to, epoch=self.epoch) for to in self._others()]
        return actions + self._finish_if_all()

    def _step_ended(self, event: StepEnded) -> list[CommitAction]:
        work = self._end_work(event.epoch, event.version)
        if not isinstance(work, RunStep):
            raise self._misuse("a step ended, but a pull is running")
        if event.digest is None:
            return self._drained()
        self.prepared = (event.version, event.digest)
        if self.state is not CommitState.RUNNING:
            return self._drained()
        self.state = CommitState.VOTING
        vote = VoteReceived(
            sender=self.rank,
            epoch=self.epoch,
            version=event.version,
            digest=event.digest,
            part=event.part,
            ready=0 if self._ready is None else self._ready.epoch,
        )
        self._votes[self.rank, vote.version] = vote
        sends: list[CommitAction] = [
            SendVote(
                to=to,
                epoch=self.epoch,
                version=vote.version,
                digest=vote.digest,
                part=vote.part,
                ready=vote.ready,
            )
            for to in self._others()
        ]
        return sends + self._count_votes()

    def _count_votes(self) -> list[CommitAction]:
        if self.state is not CommitState.VOTING or self.prepared is None:
            return []
        version, digest = self.prepared
        votes = self._senders({key: vote for key, vote in self._votes.items() if vote.version == version})
        if len(votes) < len(self.members):
            return []
        if any(vote.digest != digest for vote in votes.values()):
            return self._diverged(version, {rank: vote.digest for rank, vote in sorted(votes.items())})
        parts = tuple(votes[member.rank].part for member in self.members)
        self._votes = {key: vote for key, vote in self._votes.items() if vote.version != version}
        committed = self._commit(version, digest, parts)
        ready = self._ready
        # All members see the same votes, so all of them go, or none does.
        if ready is not None and min(vote.ready for vote in votes.values()) == ready.epoch:
            self.state, self._ready, self._fresh = CommitState.WAITING, None, False
            self._stayed = (ready.epoch, self.members)
            return [committed, EnterEpoch(epoch=ready.epoch)]
        return [committed, *self._next_step()]

    def _commit(self, version: int, digest: bytes, parts: tuple[bytes, ...]) -> Commit:
        self.version, self.digest, self.slot, self.prepared = version, digest, 1 - self.slot, None
        self.known_version = max(self.known_version, version)
        return Commit(epoch=self.epoch, version=version, digest=digest, slot=self.slot, parts=parts)

    def _finish_if_all(self) -> list[CommitAction]:
        if self.state is not CommitState.FINISHING or len(self._senders(self._finishes)) < len(self.members):
            return []
        self.state = CommitState.FINISHED
        return [Finished(version=self.version)]

    # ---- shared

    def _others(self) -> list[int]:
        return [member.rank for member in self.members if member.rank != self.rank]

    def _senders(self, kept: dict[tuple[int, int], _Message]) -> dict[int, _Message]:
        return {sender: message for (sender, _), message in kept.items() if message.epoch == self.epoch}

    def _of_epoch_on(self, kept: dict[tuple[int, int], _Message]) -> dict[tuple[int, int], _Message]:
        ranks = {member.rank for member in self.members}
        return {
            key: message
            for key, message in kept.items()
            if message.epoch > self.epoch or (message.epoch == self.epoch and message.sender in ranks)
        }

    def _keep(self, kept: dict[tuple[int, int], _Message], version: int, message: _Message) -> None:
        """Keep a message of this epoch or of one a peer has seen before us; a stale one is dropped."""
        if message.epoch < self.epoch:
            return
        if message.epoch == self.epoch and message.sender not in self._others():
            raise self._breach(f"rank {message.sender} is no member of epoch {self.epoch}")
        key = (message.sender, version)
        before = kept.get(key)
        if before is not None and before.epoch == message.epoch and before != message:
            raise self._breach(f"rank {message.sender} sent two different {type(message).__name__}")
        if len(kept) >= KEPT_MESSAGES_MAX:
            raise self._breach(f"more than {KEPT_MESSAGES_MAX} messages are kept")
        if before is None or before.epoch < message.epoch:
            kept[key] = message

    def _end_work(self, epoch: int, version: int) -> Fetch | Recall | RunStep:
        work = self._work
        if work is None or (work.epoch, work.version) != (epoch, version):
            raise self._misuse(f"work on version {version} of epoch {epoch} ended, but {work} is in flight")
        self._work = None
        return work

    def _drained(self) -> list[CommitAction]:
        """Work of an epoch that is over, or was cut short by its end, has ended."""
        if self.rank not in self._senders(self._reports):
            return self._report()  # the epoch installed meanwhile has not heard from us yet
        self.state = CommitState.WAITING
        return []

    def _diverged(self, version: int, digests: dict[int, bytes]) -> list[CommitAction]:
        held = ", ".join(f"rank {rank} {digest.hex()[:16]}" for rank, digest in digests.items())
        return self._fail(
            FailureKind.DIVERGED, f"ranks that should hold the same bits of version {version} do not: {held}"
        )

    def _fail(self, kind: FailureKind, reason: str) -> list[CommitAction]:
        self.state = CommitState.FAILED
        return [Failed(kind=kind, reason=f"rank {self.rank}, epoch {self.epoch}: {reason}")]

    def _misuse(self, what: str) -> LocalProtocolError:
        return LocalProtocolError(f"rank {self.rank}, {self.state.name}: {what}", story=tuple(self._story))

    def _breach(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"rank {self.rank}, {self.state.name}: {what}", story=tuple(self._story))


# ---- capture


def commit_config(machine: StepCommit) -> dict[str, Any]:
    """Return the configuration from which a new `StepCommit` like this one is built."""
    return {
        "rank": machine.rank,
        "version": machine.version,
        "digest": machine.digest,
        "handle": machine.slots_handle,
        "last_version": machine.last_version,
        "known_version": machine.known_version,
    }


def _build_commit(config: Mapping[str, Any]) -> StepCommit:
    return StepCommit(**config)


STEP_COMMIT: MachineKind[CommitEvent, CommitAction] = register(
    "step-commit", 2, _build_commit, events=CommitEvent, actions=CommitAction, states=(StepCommit,)
)
