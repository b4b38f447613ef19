"""Every error Basalt raises on purpose.

One root with a machine `code` and `retriable` (would the same call, made again later, stand a chance?).
Messages name the thing and the remedy. Each wire protocol has one table from these classes to its own codes.
Asserts are for our bugs; these are for the world.
"""

from __future__ import annotations

from typing import ClassVar


class BasaltError(Exception):
    """Root of all errors raised on purpose."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


class InvalidArgumentError(BasaltError):
    """A value handed in is of the wrong type, size or form."""

    code = "invalid_argument"


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


class ScriptError(BasaltError):
    """A user's script does not compile or failed."""

    code = "script_error"


class TransactionError(BasaltError):
    """A transaction was used in an order that makes no sense, or is unknown."""

    code = "transaction_error"
