"""Runtime settings: checks, and masking of secrets."""

from __future__ import annotations

import pytest

from basaltmq.errors import BasaltError, CorruptionError, InvalidArgumentError, InvalidConfigError, LimitExceededError
from basaltmq.queues.runtime_config import (
    DAMAGED,
    KEY_BYTES_MAX,
    MASK,
    VALUE_BYTES_MAX,
    RuntimeConfig,
    Setting,
    is_secret_key,
    mask_urls,
)
from basaltmq.queues.throttle.token_buckets import Limit
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore

pytestmark = pytest.mark.spec("C14")


class Rows:
    """A memory store with direct access to the rows of settings."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def put(self, name: str, row: bytes) -> None:
        batch = Batch()
        batch.put(Family.STATE, name.encode(), row)
        self.store.write(batch)

    def all(self) -> list[tuple[bytes, bytes]]:
        return list(self.store.scan(Family.STATE))


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def config(rows: Rows) -> RuntimeConfig:
    return RuntimeConfig(rows.store)


def test_a_setting_is_written_read_and_deleted(config: RuntimeConfig, rows: Rows) -> None:
    assert config.get("region") is None
    assert config.set("region", "eu") == Setting("region", "eu", False)
    assert config.get("region") == Setting("region", "eu", False)
    assert config.for_scripts("region") == "eu"
    assert config.set("region", "") == Setting("region", "", False)
    assert config.delete("region")
    assert not config.delete("region")
    assert (config.for_scripts("region"), rows.all()) == (None, [])


@pytest.mark.parametrize(
    "key",
    ["password", "db.password", "smtp_passwd", "api_key", "api-key", "apiKey", "APIKEY", "stripe.secret", "auth.token",
     "accessToken", "client_secret_v2", "aws.SecretAccessKey", "privateKey", "tls.key", "user.credentials", "db/pwd",
     "PASSWORD", "sessionCookie", "github:token", "pass", "x.auth", "to_ken"],
)  # fmt: skip
def test_secret_settings_are_masked_in_listings(config: RuntimeConfig, key: str) -> None:
    assert config.set(key, "hunter2") == Setting(key, MASK, True)
    assert config.get(key) == Setting(key, MASK, True)
    assert config.list().settings == (Setting(key, MASK, True),)
    assert config.for_scripts(key) is None, "a script could copy secrets into messages"


@pytest.mark.parametrize(
    "key",
    ["region", "monkey.count", "keyboard", "throttle.api_key:7", "throttle.token", "max_attempts", "compass", "bypass"],
)
def test_other_keys_are_shown(config: RuntimeConfig, key: str) -> None:
    assert not is_secret_key(key)
    assert config.set(key, "5,5") == Setting(key, "5,5", False)
    assert config.for_scripts(key) == "5,5"


def test_secret_flag_lasts_until_deletion(config: RuntimeConfig) -> None:
    config.set("note", "hunter2", secret=True)
    assert config.get("note") == Setting("note", MASK, True)
    assert config.for_scripts("note") is None
    config.set("note", "hunter3")
    assert config.list("no").settings == (Setting("note", MASK, True),)
    config.delete("note")
    config.set("note", "plain")
    assert config.get("note") == Setting("note", "plain", False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("amqp://guest:s3cret@host:5672/", f"amqp://guest:{MASK}@host:5672/"),
        ("see https://u:p@a/ and redis://:pw@b:1", f"see https://u:{MASK}@a/ and redis://:{MASK}@b:1"),
        ("pg://u:p@ss:w@host/db", f"pg://u:{MASK}@host/db"),
        ("https://host:443/path@x", "https://host:443/path@x"),
        ("https://host/?a=b:c@d", "https://host/?a=b:c@d"),
        ("user@host", "user@host"),
        ("plain", "plain"),
    ],
)
def test_passwords_in_urls_are_masked(config: RuntimeConfig, text: str, shown: str) -> None:
    assert mask_urls(text) == shown
    assert config.set("endpoint", text).value == shown
    assert config.for_scripts("endpoint") == text


def test_masking_urls_takes_linear_time() -> None:
    mask_urls("a" * 60_000)
    mask_urls("a://" * 15_000)
    mask_urls("a://b:" * 10_000)


def test_errors_and_reprs_do_not_show_the_value(config: RuntimeConfig) -> None:
    secret = "hunter2" * 20_000
    for value in (secret, "hunter2\ud800", b"hunter2"):
        with pytest.raises(BasaltError) as caught:
            config.set("password", value)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
        assert "password" in str(caught.value)
    assert "hunter2" not in repr(config.set("password", "hunter2"))


def test_lists_are_paged_with_the_total_of_the_prefix(config: RuntimeConfig) -> None:
    for number in range(25):
        config.set(f"a.{number:02}", str(number))
        config.set(f"b.{number:02}", str(number))
    page = config.list("a.", limit=10)
    assert ([setting.key for setting in page.settings], page.total) == ([f"a.{n:02}" for n in range(10)], 25)
    page = config.list("a.", limit=10, after="a.19")
    assert ([setting.key for setting in page.settings], page.total) == ([f"a.{n:02}" for n in range(20, 25)], 25)
    assert config.list("a.", limit=0).total == 25
    assert config.list().total == 50
    assert config.list("c") == config.list("c", after="x")
    assert config.list("c").total == 0
    for limit in (-1, 10_001, True, "5"):
        with pytest.raises(InvalidArgumentError, match="limit must be"):
            config.list(limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="prefix must be text"):
        config.list(b"a")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["fast", "10,", "-1,5", "1,0", "10,2.5", "1,2,3", "", "nan,1"])
def test_invalid_throttles_are_refused_without_a_write(config: RuntimeConfig, rows: Rows, value: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"'throttle.x': .*throttle"):
        config.set("throttle.x", value)
    assert rows.all() == []


def test_throttles_are_read_and_damaged_ones_reported(config: RuntimeConfig, rows: Rows) -> None:
    config.set("throttle.tenant.7", "10,20")
    config.set("throttle.b", "0.5,1")
    rows.put("throttle.bad", b"\0nonsense")
    rows.put("throttle.worse", b"\x07")
    config.set("other", "x")
    problems: list[str] = []
    assert dict(config.throttles(problems.append)) == {"tenant.7": Limit(10, 20), "b": Limit(0.5, 1)}
    assert len(problems) == 2
    assert "throttle.bad" in problems[0]
    assert "throttle.worse" in problems[1]


@pytest.mark.parametrize("row", [b"", b"\x02x", b"\0\xff"])
def test_damaged_setting_is_reported_and_hides_no_others(config: RuntimeConfig, rows: Rows, row: bytes) -> None:
    config.set("a", "1")
    rows.put("b", row)
    for read in (config.get, config.for_scripts):
        with pytest.raises(CorruptionError, match="setting 'b'"):
            read("b")
    assert config.list().settings == (Setting("a", "1", False), Setting("b", DAMAGED, True))
    config.set("b", "2")
    assert config.get("b") != Setting("b", DAMAGED, True)


@pytest.mark.parametrize(
    ("key", "error"),
    [("", LimitExceededError), ("x" * (KEY_BYTES_MAX + 1), LimitExceededError), ("a\nb", InvalidArgumentError),
     ("a\ud800", InvalidArgumentError), (5, InvalidArgumentError), (b"a", InvalidArgumentError),
     ("throttle.", InvalidArgumentError)],
)  # fmt: skip
def test_invalid_setting_keys_are_refused(config: RuntimeConfig, key: object, error: type[BasaltError]) -> None:
    for use in (lambda: config.set(key, "1"), lambda: config.get(key), lambda: config.delete(key)):  # type: ignore[arg-type]
        with pytest.raises(error):
            use()


def test_a_value_may_be_as_large_as_the_limit(config: RuntimeConfig) -> None:
    config.set("a", "x" * VALUE_BYTES_MAX)
    with pytest.raises(LimitExceededError, match="exceeds the limit"):
        config.set("a", "x" * (VALUE_BYTES_MAX + 1))
    assert config.for_scripts("a") == "x" * VALUE_BYTES_MAX


def test_watchers_are_notified_after_the_change_is_written(config: RuntimeConfig) -> None:
    seen: list[tuple[str, str | None, str | None]] = []
    end = config.watch("throttle.", lambda key, value: seen.append((key, value, config.for_scripts(key))))
    config.set("throttle.x", "1,1")
    config.set("other", "1")
    with pytest.raises(InvalidConfigError):
        config.set("throttle.x", "nonsense")
    config.delete("throttle.x")
    config.delete("throttle.x")
    assert seen == [("throttle.x", "1,1", "1,1"), ("throttle.x", None, None)]
    end()
    end()
    config.set("throttle.x", "2,2")
    assert len(seen) == 2


def test_failing_watcher_does_not_block_others(config: RuntimeConfig) -> None:
    seen: list[str] = []

    def fail(key: str, value: str | None) -> None:
        raise RuntimeError("first")

    config.watch("", fail)

    def hear_once(key: str, value: str | None) -> None:
        seen.append(key)
        end()

    end = config.watch("", hear_once)
    config.watch("", lambda key, value: seen.append(key.upper()))
    with pytest.raises(RuntimeError, match="first"):
        config.set("a", "1")
    assert seen == ["a", "A"], "also when a watcher unsubscribes meanwhile"
    assert config.for_scripts("a") == "1"
