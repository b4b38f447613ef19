"""All errors that Basalt raises on purpose.

They have one root class with a machine-readable `code`. `retriable` says whether the same call may succeed later.
Messages name the thing and the remedy. Each wire protocol maps these classes to its own codes in one table. Bugs in
Basalt raise AssertionError instead.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class BasaltError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


class InvalidArgumentError(BasaltError):
    """An argument has the wrong type, size or form."""

    code = "invalid_argument"


class TimestampRangeError(InvalidArgumentError):
    """A record's timestamp cannot be represented by readers."""

    code = "invalid_timestamp"


class UnknownExchangeTypeError(InvalidArgumentError):
    """The exchange type is unknown."""

    code = "unknown_exchange_type"


class InvalidConfigError(BasaltError):
    """A configuration value is invalid."""

    code = "invalid_config"


class LimitExceededError(BasaltError):
    """A named limit was exceeded."""

    code = "limit_exceeded"


class StorageError(BasaltError):
    """The storage layer failed."""

    code = "storage_error"


class StoreClosedError(StorageError):
    """The store was closed."""

    code = "store_closed"


class StorePoisonedError(StorageError):
    """After an I/O error, memory may be wrong; reopen the store to recover."""

    code = "store_poisoned"

    def __init__(self, message: str = "", is_disk_full: bool = False) -> None:
        super().__init__(message, is_disk_full)
        self.is_disk_full = is_disk_full
        """Whether the cause was a full disk. Reopening the store helps once there is space."""

    def __str__(self) -> str:
        return str(self.args[0])


class StoreLockedError(StorageError):
    """Another process has the store open for writing."""

    code = "store_locked"
    retriable = True


class StoreNotFoundError(StorageError):
    """The path does not exist, and the store was not to be created."""

    code = "store_not_found"


class NotAStoreError(StorageError):
    """The path is not a Basalt store."""

    code = "not_a_store"


class StoreTooNewError(StorageError):
    """The store was written by a later version of Basalt."""

    code = "store_too_new"


class StoreTooOldError(StorageError):
    """The store was written by an earlier version of Basalt that cannot be upgraded."""

    code = "store_too_old"


class StoreReadOnlyError(StorageError):
    """The directory or the open mode does not allow writes."""

    code = "store_read_only"


class UnknownFamilyError(StorageError):
    """The column family is unknown in this version."""

    code = "unknown_family"


class UnknownOptionError(StorageError):
    """RocksDB does not know the option, or it cannot change while the store is open."""

    code = "unknown_option"


class StoreStalledError(StorageError):
    """RocksDB compaction is behind; the write was not applied."""

    code = "store_stalled"
    retriable = True


class StoreOverfullError(StorageError):
    """The store exceeds its size limit; producers are blocked until it shrinks."""

    code = "store_overfull"
    retriable = True


class DiskFullError(StorageError):
    """The disk has no free space."""

    code = "disk_full"
    retriable = True


class CorruptionError(StorageError):
    """Bytes on disk are not those that were written; the message names the file."""

    code = "corruption"


class AlreadyExistsError(BasaltError):
    """An object with this identity exists."""

    code = "already_exists"


class NotFoundError(BasaltError):
    """No object with this identity exists."""

    code = "not_found"


class QueueNotFoundError(NotFoundError):
    """The queue does not exist."""

    code = "queue_not_found"


class QueueExistsError(AlreadyExistsError):
    """The queue exists."""

    code = "queue_already_exists"


class MessageNotFoundError(NotFoundError):
    """The queue has no message with this id."""

    code = "message_not_found"


class StaleLeaseError(BasaltError):
    """The token is not that of the current lease."""

    code = "stale_lease"


class QueueFailedError(BasaltError):
    """An unexpected error hit the queue. It is served again after an automatic or manual restart."""

    code = "queue_failed"
    retriable = True


class QueueFullError(LimitExceededError):
    """The queue is at its limit and rejects messages."""

    code = "queue_full"
    retriable = True


class ScriptError(BasaltError):
    """A user's script does not compile or failed."""

    code = "script_error"


class TransactionError(BasaltError):
    """The transaction is unknown, or does not allow this step now."""

    code = "transaction_error"


class ShardNotFoundError(NotFoundError):
    """The shard does not exist."""

    code = "shard_not_found"


class ShardExistsError(AlreadyExistsError):
    """The shard exists."""

    code = "shard_already_exists"


class TopicNotFoundError(NotFoundError):
    """The topic does not exist."""

    code = "topic_not_found"


class TopicExistsError(AlreadyExistsError):
    """The topic exists."""

    code = "topic_already_exists"


class GroupNotFoundError(NotFoundError):
    """The consumer group has not committed any offset."""

    code = "group_not_found"


class OffsetOutOfRangeError(BasaltError):
    """The offset was deleted by retention or does not exist yet; `earliest` and `latest` are the valid range."""

    code = "offset_out_of_range"

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

    code = "not_leader"
    retriable = True

    def __init__(self, shard: int, leader: str) -> None:
        super().__init__(f"shard {shard} is led by node {leader!r}; send the write there")
        self.shard = shard
        self.leader = leader


class TimedOutError(BasaltError):
    """The operation timed out and was undone."""

    code = "timed_out"
    retriable = True


class StaleMemberError(BasaltError):
    """The consumer is no longer a member of its group, or its partitions were reassigned."""

    code = "stale_member"


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

    code = "xa_invalid"
    xa_code = -5


class XaProtocolError(XaError):
    """The state of the branch does not allow the step (XAER_PROTO)."""

    code = "xa_protocol"
    xa_code = -6


class XidInUseError(XaError):
    """A branch with this xid exists (XAER_DUPID)."""

    code = "xa_duplicate_xid"
    xa_code = -8


class XaRolledBackError(XaError):
    """The branch could not be kept and was rolled back (XA_RBROLLBACK)."""

    code = "xa_rolled_back"
    xa_code = 100


class XaHeuristicCommitError(XaError):
    """An operator committed the branch; forget it (XA_HEURCOM)."""

    code = "xa_heuristic_commit"
    xa_code = 7


class XaHeuristicRollbackError(XaError):
    """An operator rolled back the branch; forget it (XA_HEURRB)."""

    code = "xa_heuristic_rollback"
    xa_code = 6


class StoreBehindError(StorageError):
    """The log refers to something that is newer than the view's store snapshot; the view refreshes and retries."""

    code = "store_behind"
    retriable = True


class SegmentGoneError(StorageError):
    """The segment was deleted. Its live records were moved, and the index has their new places."""

    code = "segment_gone"
    retriable = True


class DamagedFrameError(CorruptionError):
    """A frame of a stream's log is unreadable; the reader can continue after it."""

    code = "damaged_frame"

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

    code = "vhost_not_found"


class VHostDownError(BasaltError):
    """The virtual host failed and is not served until an operator or its restart starts it."""

    code = "vhost_down"
    retriable = True


class ExchangeNotFoundError(NotFoundError):
    """The exchange does not exist."""

    code = "exchange_not_found"


class PreconditionFailedError(BasaltError):
    """The existing object differs from the description in the call, or an argument cannot be used."""

    code = "precondition_failed"


class ResourceLockedError(BasaltError):
    """The queue is exclusive to another connection."""

    code = "resource_locked"


class AccessRefusedError(BasaltError):
    """The user lacks permission, or users cannot modify the object."""

    code = "access_refused"


class AuthenticationError(BasaltError):
    """The credentials are wrong, or the user may not connect from this address."""

    code = "authentication_failed"


class TooManyLoginsError(AuthenticationError):
    """Too many logins failed or are in progress; the credentials were not checked."""

    code = "too_many_logins"
    retriable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UserNotFoundError(NotFoundError):
    """The user does not exist."""

    code = "user_not_found"


class PublishersHeldError(BasaltError):
    """Publishers are blocked until the disk, memory or store has room; consume messages and retry later."""

    code = "publishers_held"
    retriable = True


class MalformedTableError(InvalidArgumentError):
    """An AMQP field table is truncated, nested too deep, or contains values without an AMQP type."""

    code = "malformed_table"


class MalformedPropertiesError(InvalidArgumentError):
    """The properties of a message do not match their flags."""

    code = "malformed_properties"


class BadExpirationError(PreconditionFailedError):
    """The expiration of a message is not a valid number of milliseconds."""

    code = "bad_expiration"


class QueueHeldError(TransactionError):
    """A prepared branch holds messages in or for the queue; it cannot be deleted until the branch is decided."""

    code = "queue_held"
    retriable = True


class AddressUnavailableError(BasaltError):
    """The address or port cannot be bound."""

    code = "address_unavailable"


class RemoteError(BasaltError):
    """A broker's admin API refused the call or is unreachable; `code` is the broker's code."""

    code = "unreachable"

    def __init__(self, message: str, code: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]
        self.status = status


class UnavailableError(BasaltError):
    """The broker is unreachable or stopping."""

    code = "unavailable"
    retriable = True


class DataLossError(BasaltError):
    """Records to be read no longer exist."""

    code = "data_loss"


class EnvironmentMissingError(BasaltError):
    """The machine lacks a required program or library, or has an unsuitable version."""

    code = "environment_missing"


class UnsupportedCodecError(BasaltError):
    """The compression of a record batch is not supported; the message names it."""

    code = "unsupported_codec"


class MalformedRequestError(InvalidArgumentError):
    """The bytes are not a valid request; the connection is closed."""

    code = "malformed_request"


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk caused the error, directly or as a wrapped cause."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, StorePoisonedError) and error.is_disk_full):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
