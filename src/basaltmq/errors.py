"""Every error Basalt raises on purpose.

One root with a machine `code` and `retriable` (would the same call, made again later, stand a chance?).
Messages name the thing and the remedy. Each wire protocol has one table from these classes to its own codes.
Asserts are for our bugs; these are for the world.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class BasaltError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


class InvalidArgumentError(BasaltError):
    """A value handed in is of the wrong type, size or form."""

    code = "invalid_argument"


class TimestampRangeError(InvalidArgumentError):
    """A record's time cannot be represented by readers."""

    code = "invalid_timestamp"


class UnknownExchangeTypeError(InvalidArgumentError):
    """There is no such type of exchange."""

    code = "unknown_exchange_type"


class InvalidConfigError(BasaltError):
    """A configuration value cannot be used."""

    code = "invalid_config"


class LimitExceededError(BasaltError):
    """A named limit was passed."""

    code = "limit_exceeded"


class StorageError(BasaltError):
    """The storage below failed."""

    code = "storage_error"


class StoreClosedError(StorageError):
    """The store was closed."""

    code = "store_closed"


class StorePoisonedError(StorageError):
    """An I/O error made what is in memory doubtful; open the store again to recover."""

    code = "store_poisoned"

    def __init__(self, message: str = "", is_disk_full: bool = False) -> None:
        super().__init__(message, is_disk_full)
        self.is_disk_full = is_disk_full
        """The I/O error was a full disk: opening the store again helps once there is space."""

    def __str__(self) -> str:
        return str(self.args[0])


class StoreLockedError(StorageError):
    """Another process has the store open for writing."""

    code = "store_locked"
    retriable = True


class StoreNotFoundError(StorageError):
    """There is nothing at the path, and nothing was to be created."""

    code = "store_not_found"


class NotAStoreError(StorageError):
    """The path holds something that is not a Basalt store."""

    code = "not_a_store"


class StoreTooNewError(StorageError):
    """The store was written by a later version of Basalt."""

    code = "store_too_new"


class StoreReadOnlyError(StorageError):
    """The directory, or the way it was opened, does not allow writes."""

    code = "store_read_only"


class UnknownFamilyError(StorageError):
    """A column family this version does not know."""

    code = "unknown_family"


class UnknownOptionError(StorageError):
    """An option RocksDB does not know, or that cannot change while the store is open."""

    code = "unknown_option"


class StoreStalledError(StorageError):
    """RocksDB is behind with compaction; the write was not applied."""

    code = "store_stalled"
    retriable = True


class StoreOverfullError(StorageError):
    """The store passed its size limit; producers are held until it shrinks."""

    code = "store_overfull"
    retriable = True


class DiskFullError(StorageError):
    """No space left on the device."""

    code = "disk_full"
    retriable = True


class CorruptionError(StorageError):
    """Bytes on disk are not what was written; the message names the file."""

    code = "corruption"


class AlreadyExistsError(BasaltError):
    """Something of that identity exists."""

    code = "already_exists"


class NotFoundError(BasaltError):
    """Nothing of that identity exists."""

    code = "not_found"


class QueueNotFoundError(NotFoundError):
    """No queue of that name."""

    code = "queue_not_found"


class QueueExistsError(AlreadyExistsError):
    """A queue of that name exists."""

    code = "queue_already_exists"


class MessageNotFoundError(NotFoundError):
    """No message of that id in the queue."""

    code = "message_not_found"


class StaleLeaseError(BasaltError):
    """The token is not that of the current lease."""

    code = "stale_lease"


class QueueFailedError(BasaltError):
    """An unexpected error hit the queue. It is served again after a restart, by itself or by an operator."""

    code = "queue_failed"
    retriable = True


class QueueFullError(LimitExceededError):
    """The queue is at its limit and refuses what it is sent."""

    code = "queue_full"
    retriable = True


class ScriptError(BasaltError):
    """A user's script does not compile or failed."""

    code = "script_error"


class TransactionError(BasaltError):
    """A transaction was used in an order that makes no sense, or is unknown."""

    code = "transaction_error"


class ShardNotFoundError(NotFoundError):
    """No shard of that number or name."""

    code = "shard_not_found"


class ShardExistsError(AlreadyExistsError):
    """A shard of that name exists."""

    code = "shard_already_exists"


class TopicNotFoundError(NotFoundError):
    """No topic of that name."""

    code = "topic_not_found"


class TopicExistsError(AlreadyExistsError):
    """A topic of that name exists."""

    code = "topic_already_exists"


class GroupNotFoundError(NotFoundError):
    """No consumer group of that name has committed an offset."""

    code = "group_not_found"


class OffsetOutOfRangeError(BasaltError):
    """The offset lies before what is kept; `earliest` and `latest` say what is there."""

    code = "offset_out_of_range"

    def __init__(self, shard: int, offset: int, earliest: int, latest: int) -> None:
        super().__init__(
            f"offset {offset} of shard {shard} is no longer kept: offsets {earliest} to {latest} are available; "
            f"read from {earliest} (earliest) or {latest} (latest)"
        )
        self.shard = shard
        self.offset = offset
        self.earliest = earliest
        self.latest = latest


class NotLeaderError(BasaltError):
    """The shard is led by another node; send the write there."""

    code = "not_leader"
    retriable = True

    def __init__(self, shard: int, leader: str) -> None:
        super().__init__(f"shard {shard} is led by node {leader!r}; send the write there")
        self.shard = shard
        self.leader = leader


class TimedOutError(BasaltError):
    """Not finished within the time given; what was begun has been undone."""

    code = "timed_out"
    retriable = True


class StaleMemberError(BasaltError):
    """A consumer is no longer a member of its group, or its partitions were given to another."""

    code = "stale_member"


class EntryLockedError(TransactionError):
    """Another open or prepared transaction takes that queue entry."""

    code = "entry_locked"
    retriable = True


class XaError(TransactionError):
    """A distributed transaction's branch could not take the step; `xa_code` is X/Open's number for it."""

    code = "xa_error"
    xa_code: ClassVar[int] = -3


class UnknownXidError(XaError):
    """No branch of that xid (XAER_NOTA)."""

    code = "xa_unknown_xid"
    xa_code = -4


class XaInvalidError(XaError):
    """An xid or flag that X/Open does not allow (XAER_INVAL)."""

    code = "xa_invalid"
    xa_code = -5


class XaProtocolError(XaError):
    """The branch is in a state that does not allow the step (XAER_PROTO)."""

    code = "xa_protocol"
    xa_code = -6


class XidInUseError(XaError):
    """A branch of that xid exists (XAER_DUPID)."""

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
    """An operator rolled the branch back; forget it (XA_HEURRB)."""

    code = "xa_heuristic_rollback"
    xa_code = 6


class StoreBehindError(StorageError):
    """The log speaks of something the store did not know when a view looked at it; the view looks again."""

    code = "store_behind"
    retriable = True


class SegmentGoneError(StorageError):
    """The segment was deleted; what lived in it was moved or is gone, and the index knows."""

    code = "segment_gone"
    retriable = True


class DamagedFrameError(CorruptionError):
    """A frame of a stream's log cannot be read; the reader can go on behind it."""

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
        """The same error, with the names that users know the shard by."""
        where = f"topic {topic!r}, partition {partition}, "
        return DamagedFrameError(self.shard, self.base_offset, self.last_offset, self.reason, where)


class VHostNotFoundError(NotFoundError):
    """No virtual host of that name."""

    code = "vhost_not_found"


class VHostDownError(BasaltError):
    """The virtual host failed and is not served; an operator starts it, or its restart is under way."""

    code = "vhost_down"
    retriable = True


class ExchangeNotFoundError(NotFoundError):
    """No exchange of that name."""

    code = "exchange_not_found"


class PreconditionFailedError(BasaltError):
    """What exists is not what the call describes, or an argument cannot be used."""

    code = "precondition_failed"


class ResourceLockedError(BasaltError):
    """The queue belongs to another connection."""

    code = "resource_locked"


class AccessRefusedError(BasaltError):
    """The user may not do that, or the thing is not for users to touch."""

    code = "access_refused"


class AuthenticationError(BasaltError):
    """Name and password do not go together, or the user may not come in from there."""

    code = "authentication_failed"


class TooManyLoginsError(AuthenticationError):
    """Too many logins failed or are being checked; the credentials were not looked at."""

    code = "too_many_logins"
    retriable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UserNotFoundError(NotFoundError):
    """No user of that name."""

    code = "user_not_found"


class PublishersHeldError(BasaltError):
    """Publishing is held until the disk, memory or store has room; consume, and try again later."""

    code = "publishers_held"
    retriable = True


class MalformedTableError(InvalidArgumentError):
    """An AMQP field table breaks off, nests too deep or holds what has no form in one."""

    code = "malformed_table"


class MalformedPropertiesError(InvalidArgumentError):
    """The properties of a message are not what their flags say."""

    code = "malformed_properties"


class BadExpirationError(PreconditionFailedError):
    """The expiration of a message is not a number of milliseconds that can be."""

    code = "bad_expiration"


class QueueHeldError(TransactionError):
    """A prepared branch has messages in the queue, or for it; the queue stays until the branch is decided."""

    code = "queue_held"
    retriable = True


class AddressUnavailableError(BasaltError):
    """An address or port cannot be listened on."""

    code = "address_unavailable"


class RemoteError(BasaltError):
    """A broker refused over its admin API, or could not be reached; `code` is what the broker said."""

    code = "unreachable"

    def __init__(self, message: str, code: str, status: int = 0) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]
        self.status = status


class UnavailableError(BasaltError):
    """The broker cannot be reached, or is stopping."""

    code = "unavailable"
    retriable = True


class DataLossError(BasaltError):
    """Records that were to be read are not there any more."""

    code = "data_loss"


class EnvironmentMissingError(BasaltError):
    """The machine lacks something that is needed, or has it in a version that will not do."""

    code = "environment_missing"


class UnsupportedCodecError(BasaltError):
    """A record batch is compressed in a way that cannot be looked into here; the message names it."""

    code = "unsupported_codec"


class MalformedRequestError(InvalidArgumentError):
    """Bytes that are not the request they say to be; who sent them is cut off."""

    code = "malformed_request"


def is_disk_full(error: BaseException | None) -> bool:
    """Was a full disk the cause, however often the error was wrapped since?"""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, StorePoisonedError) and error.is_disk_full):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
