"""All errors that Basalt raises on purpose.

They have one root class with a machine-readable `code`: the name of the class in snake case without `Error`, unless the
class sets another. `retriable` says whether the same call may succeed later.
Messages name the thing and the remedy. Each wire protocol maps these classes to its own codes in one table. Bugs in
Basalt raise AssertionError instead.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar


class BasaltError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()


class InvalidArgumentError(BasaltError):
    """An argument has the wrong type, size or form."""


class TimestampRangeError(InvalidArgumentError):
    """A record's timestamp cannot be represented by readers."""

    code = "invalid_timestamp"


class UnknownExchangeTypeError(InvalidArgumentError):
    """The exchange type is unknown."""


class InvalidConfigError(BasaltError):
    """A configuration value is invalid."""


class LimitExceededError(BasaltError):
    """A named limit was exceeded."""


class StorageError(BasaltError):
    """The storage layer failed."""

    code = "storage_error"


class StoreClosedError(StorageError):
    """The store was closed."""


class StorePoisonedError(StorageError):
    """After an I/O error, memory may be wrong; reopen the store to recover."""

    def __init__(self, message: str = "", is_disk_full: bool = False) -> None:
        super().__init__(message, is_disk_full)
        self.is_disk_full = is_disk_full
        """Whether the cause was a full disk. Reopening the store helps once there is space."""

    def __str__(self) -> str:
        return str(self.args[0])


class StoreLockedError(StorageError):
    """Another process has the store open for writing."""

    retriable = True


class StoreNotFoundError(StorageError):
    """The path does not exist, and the store was not to be created."""


class NotAStoreError(StorageError):
    """The path is not a Basalt store."""

    code = "not_a_store"


class StoreTooNewError(StorageError):
    """The store was written by a later version of Basalt."""


class StoreTooOldError(StorageError):
    """The store was written by an earlier version of Basalt that cannot be upgraded."""


class StoreReadOnlyError(StorageError):
    """The directory or the open mode does not allow writes."""


class UnknownFamilyError(StorageError):
    """The column family is unknown in this version."""


class UnknownOptionError(StorageError):
    """RocksDB does not know the option, or it cannot change while the store is open."""


class StoreStalledError(StorageError):
    """RocksDB compaction is behind; the write was not applied."""

    retriable = True


class StoreOverfullError(StorageError):
    """The store exceeds its size limit; producers are blocked until it shrinks."""

    retriable = True


class DiskFullError(StorageError):
    """The disk has no free space."""

    retriable = True


class CorruptionError(StorageError):
    """Bytes on disk are not those that were written; the message names the file."""


class AlreadyExistsError(BasaltError):
    """An object with this identity exists."""


class NotFoundError(BasaltError):
    """No object with this identity exists."""


class QueueNotFoundError(NotFoundError):
    """The queue does not exist."""


class QueueExistsError(AlreadyExistsError):
    """The queue exists."""

    code = "queue_already_exists"


class MessageNotFoundError(NotFoundError):
    """The queue has no message with this id."""


class StaleLeaseError(BasaltError):
    """The token is not that of the current lease."""


class QueueFailedError(BasaltError):
    """An unexpected error hit the queue. It is served again after an automatic or manual restart."""

    retriable = True


class QueueFullError(LimitExceededError):
    """The queue is at its limit and rejects messages."""

    retriable = True


class ScriptError(BasaltError):
    """A user's script does not compile or failed."""

    code = "script_error"


class TransactionError(BasaltError):
    """The transaction is unknown, or does not allow this step now."""

    code = "transaction_error"


class ShardNotFoundError(NotFoundError):
    """The shard does not exist."""


class ShardExistsError(AlreadyExistsError):
    """The shard exists."""

    code = "shard_already_exists"


class TopicNotFoundError(NotFoundError):
    """The topic does not exist."""


class TopicExistsError(AlreadyExistsError):
    """The topic exists."""

    code = "topic_already_exists"


class GroupNotFoundError(NotFoundError):
    """The consumer group has not committed any offset."""


class OffsetOutOfRangeError(BasaltError):
    """The offset was deleted by retention or does not exist yet; `earliest` and `latest` are the valid range."""

    def __init__(self, shard: int, offset: int, earliest: int, latest: int) -> None:
        super().__init__(
            f"offset {offset} of shard {shard} is not available; offsets {earliest} to {latest} are available: "
            f"read from {earliest} (earliest) or {latest} (latest)"
        )
        self.shard = shard
        self.offset = offset
        self.earliest = earliest
        self.latest = latest


class NotLeaderError(BasaltError):
    """Another node leads the shard; send the write there."""

    retriable = True

    def __init__(self, shard: int, leader: str) -> None:
        super().__init__(f"shard {shard} is led by node {leader!r}; send the write there")
        self.shard = shard
        self.leader = leader


class TimedOutError(BasaltError):
    """The operation timed out and was undone."""

    retriable = True


class StaleMemberError(BasaltError):
    """The consumer is no longer a member of its group, or its partitions were reassigned."""


class XaError(TransactionError):
    """A step of a distributed transaction's branch failed; `xa_code` is the X/Open code."""

    code = "xa_error"
    xa_code: ClassVar[int] = -3


class UnknownXidError(XaError):
    """No branch has this xid (XAER_NOTA)."""

    code = "xa_unknown_xid"
    xa_code = -4


class XaInvalidError(XaError):
    """The xid or flag is not allowed by X/Open (XAER_INVAL)."""

    xa_code = -5


class XaProtocolError(XaError):
    """The state of the branch does not allow the step (XAER_PROTO)."""

    xa_code = -6


class XidInUseError(XaError):
    """A branch with this xid exists (XAER_DUPID)."""

    code = "xa_duplicate_xid"
    xa_code = -8


class XaRolledBackError(XaError):
    """The branch could not be kept and was rolled back (XA_RBROLLBACK)."""

    xa_code = 100


class XaHeuristicCommitError(XaError):
    """An operator committed the branch; forget it (XA_HEURCOM)."""

    xa_code = 7


class XaHeuristicRollbackError(XaError):
    """An operator rolled back the branch; forget it (XA_HEURRB)."""

    xa_code = 6


class StoreBehindError(StorageError):
    """The log refers to something that is newer than the view's store snapshot; the view refreshes and retries."""

    retriable = True


class SegmentGoneError(StorageError):
    """The segment was deleted. Its live records were moved, and the index has their new places."""

    retriable = True


class DamagedFrameError(CorruptionError):
    """A frame of a stream's log is unreadable; the reader can continue after it."""

    def __init__(self, shard: int, base_offset: int, last_offset: int, reason: str, where: str = "") -> None:
        super().__init__(
            f"{where}shard {shard}, offsets {base_offset} to {last_offset}, cannot be read: {reason}; "
            f"read on from offset {last_offset + 1}"
        )
        self.shard = shard
        self.base_offset = base_offset
        self.last_offset = last_offset
        self.reason = reason

    def within(self, topic: str, partition: int) -> DamagedFrameError:
        """Return the same error with the topic and partition that users know."""
        where = f"topic {topic!r}, partition {partition}, "
        return DamagedFrameError(self.shard, self.base_offset, self.last_offset, self.reason, where)


class VHostNotFoundError(NotFoundError):
    """The virtual host does not exist."""


class VHostDownError(BasaltError):
    """The virtual host failed and is not served until an operator or its restart starts it."""

    retriable = True


class ExchangeNotFoundError(NotFoundError):
    """The exchange does not exist."""


class PreconditionFailedError(BasaltError):
    """The existing object differs from the description in the call, or an argument cannot be used."""


class ResourceLockedError(BasaltError):
    """The queue is exclusive to another connection."""


class AccessRefusedError(BasaltError):
    """The user lacks permission, or users cannot modify the object."""


class AuthenticationError(BasaltError):
    """The credentials are wrong, or the user may not connect from this address."""

    code = "authentication_failed"


class TooManyLoginsError(AuthenticationError):
    """Too many logins failed or are in progress; the credentials were not checked."""

    retriable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UserNotFoundError(NotFoundError):
    """The user does not exist."""


class PublishersBlockedError(BasaltError):
    """Publishers are blocked until the disk, memory or store has room; consume messages and retry later."""

    retriable = True


class MalformedTableError(InvalidArgumentError):
    """An AMQP field table is truncated, nested too deep, or contains values without an AMQP type."""


class MalformedPropertiesError(InvalidArgumentError):
    """The properties of a message do not match their flags."""


class BadExpirationError(PreconditionFailedError):
    """The expiration of a message is not a valid number of milliseconds."""


class QueueHeldError(TransactionError):
    """A prepared branch holds messages in or for the queue; it cannot be deleted until the branch is decided."""

    retriable = True


class AddressUnavailableError(BasaltError):
    """The address or port cannot be bound."""


class RemoteError(BasaltError):
    """A broker's admin API refused the call or is unreachable; `code` is the broker's code."""

    code = "unreachable"

    def __init__(self, message: str, code: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]
        self.status = status


class UnavailableError(BasaltError):
    """The broker is unreachable or stopping."""

    retriable = True


class DataLossError(BasaltError):
    """Records to be read no longer exist."""


def install_hint(extra: str) -> str:
    """Return the command that installs an extra: from an index, and from a clone of the repository."""
    return f"pip install 'basaltmq[{extra}]' (in a clone: pip install '.[{extra}]')"


class EnvironmentMissingError(BasaltError):
    """The machine lacks a required program or library, or has an unsuitable version."""


class UnsupportedCodecError(BasaltError):
    """The compression of a record batch is not supported; the message names it."""


class MalformedRequestError(InvalidArgumentError):
    """The bytes are not a valid request; the connection is closed."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk caused the error, directly or as a wrapped cause."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, StorePoisonedError) and error.is_disk_full):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
