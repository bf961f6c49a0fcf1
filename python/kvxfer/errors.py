"""Exceptions, one for each kind of failure. All of them are `KvxferError`s, carry the values that clash in
their message, and pickle.

A room that failed has its exception in `Event.error`; `Agent.wait` and `Agent.wait_async` raise it. What is
wrong with a call itself is raised by the call, at once and with nothing done.
"""

from __future__ import annotations

__all__ = [
    "AgentClosed",
    "AuthError",
    "BadArgument",
    "Cancelled",
    "ChecksumMismatch",
    "FabricError",
    "Forked",
    "InternalError",
    "KvxferError",
    "LayoutMismatch",
    "ListenError",
    "NotSupported",
    "PageError",
    "PeerLost",
    "PoolFull",
    "ProtocolError",
    "QueueFull",
    "RoomInUse",
    "StaleGrant",
    "TokensMismatch",
    "TransferTimeout",
    "Unhealthy",
    "UnknownRoom",
    "VersionMismatch",
    "WaitTimeout",
]


class KvxferError(Exception):
    """Base of all of kvxfer's exceptions."""

    room: int | None = None
    """The room that it is about, if it is about one."""


class LayoutMismatch(KvxferError):
    """The two sides' layouts, shards, roles, modes or models do not fit; the message names the field and both
    values.
    """


class PeerLost(KvxferError):
    """A peer is gone: dead, restarted, fenced or unreachable."""


class TransferTimeout(KvxferError):
    """The room took longer than its `timeout` or `bootstrap_timeout`."""


class Cancelled(KvxferError):
    """Somebody cancelled the room, on this side or the other."""


class StaleGrant(KvxferError):
    """A message named a grant that a cancel has voided."""


class AuthError(KvxferError):
    """The secret or a certificate is missing, wrong or cannot be read."""


class PageError(KvxferError):
    """Page ids are out of range, repeated, or overlap pages that are granted now."""


class RoomInUse(KvxferError):
    """The room is in use on this agent; draw a new one with `new_room`."""


class TokensMismatch(KvxferError):
    """The sides disagree on the tokens, or the last push left a gap."""


class FabricError(KvxferError):
    """The fabric is not to be had, or could not carry the bytes."""


class ChecksumMismatch(KvxferError):
    """The bytes that arrived have another checksum than the bytes that were sent (`expect(verify=)`); the
    message has both.
    """


class VersionMismatch(KvxferError):
    """The peer speaks no version of the protocol that this side speaks."""


class ProtocolError(KvxferError):
    """The peer broke the protocol, or is not kvxfer."""


class AgentClosed(KvxferError):
    """The agent was closed, this one or the peer's."""


class Unhealthy(KvxferError):
    """The agent holds more quarantined pages than its `quarantine_limit` and takes no new rooms."""


class QueueFull(KvxferError):
    """`queue_capacity` orders wait for the transfer thread. Nothing was lost: poll, and call again."""


class PoolFull(KvxferError):
    """A `PagePool` has too few free pages now. Nothing was taken: try again after a room's released event."""


class UnknownRoom(KvxferError):
    """The agent does not know the room, or it ended well and `poll` has said so."""


class Forked(KvxferError):
    """The agent was made before a fork and belongs to the parent process; make one in the child."""


class BadArgument(KvxferError, ValueError):
    """An argument has a wrong value."""


class ListenError(KvxferError, OSError):
    """The agent cannot listen on its address; the message has the address and the system's reason."""


class NotSupported(KvxferError):
    """This is not built yet; the message says what to do meanwhile."""


class WaitTimeout(KvxferError, TimeoutError):
    """`Agent.wait` gave up waiting. The room goes on."""


class InternalError(KvxferError):
    """Something broke that no other kind names. Please report it."""
