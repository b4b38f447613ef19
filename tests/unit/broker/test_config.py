"""Settings: one tree, three sources, and errors that name the key, the source and the remedy."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from basaltmq.broker.config.settings import Config, Reload, leaves
from basaltmq.broker.config.sizes import GIB, MIB, ByteCount, Share
from basaltmq.broker.config.sources import MASK, changed, describe, load
from basaltmq.errors import InvalidConfigError


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "basalt.toml"
    file.write_text(text)
    return file


def test_flags_override_variables_override_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "[amqp]\nport = 1001\n[admin]\nport = 1002\n[fila]\nport = 1003\n")
    loaded = load(file, {"BASALT_ADMIN_PORT": "2002", "BASALT_FILA_PORT": "2003"}, {"fila.port": "3003"})
    config = loaded.config
    assert (config.amqps.port, config.amqp.port, config.admin.port, config.fila.port) == (5671, 1001, 2002, 3003)
    assert loaded.origins["amqps.port"] == "default"
    assert loaded.origins["amqp.port"] == str(file)
    assert loaded.origins["admin.port"] == "BASALT_ADMIN_PORT"
    assert loaded.origins["fila.port"] == "--fila-port"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[amqp]\nport = "x"',
            r"amqp\.port in .*basalt\.toml: expected an integer, not 'x'; for example amqp\.port = 5672",
        ),
        ("[amqp]\nport = 70000", r"amqp\.port in .*expected an integer <= 65535, not 70000"),
        ("[amqp]\nport = true", r"amqp\.port in .*expected an integer, not True"),
        ("[amqp]\nprot = 1", r"amqp\.prot in .*is not a Basalt setting; did you mean amqp\.port\?"),
        ("[ampq]\nport = 1", r"ampq in .*did you mean amqp\?"),
        ("amqp = 5", r"amqp in .*is a table; write \[amqp\]"),
        ("data_dir = {a = 1}", r"data_dir in .*must be one value"),
        ('[log]\nlevel = "loud"', r"log\.level in .*'loud'; use one of debug, info, warning, error"),
        ('[memory]\ncache_bytes = "7Q"', r"memory\.cache_bytes in .*'Q' is not a unit; use KiB"),
        ("[memory]\ncache_bytes = -1", r"memory\.cache_bytes in .*must not be negative"),
        ('[memory]\nhigh_watermark = "0%"', r"memory\.high_watermark in .*above 0%"),
        ('[memory]\nhigh_watermark = "much"', r'memory\.high_watermark in .*"60%" or a size'),
        ("[tls]\nkey = 3", r"tls\.key in .*expected a path"),
        ("[amqps]\nenabled = true", r"amqps\.enabled needs tls\.certificate and tls\.key"),
        ('[tls]\nclients = "ask"', r"needs tls\.authority"),
        ("[amqp]\nport = 15672", r"amqp\.port and admin\.port are both 15672 on 127\.0\.0\.1"),
        ("[amqp\nport = 1", r"is not valid TOML"),
    ],
)
def test_errors_in_the_file_are_named_with_their_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidConfigError, match=said):
        load(written(tmp_path, text))


def test_a_missing_or_invalid_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"cannot read the settings file .*nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml")
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (1 << 21))
    with pytest.raises(InvalidConfigError, match="is larger than"):
        load(big)


def test_errors_do_not_repeat_secrets(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load(written(tmp_path, "[auth]\ndefault_password = 987654"))
    assert "987654" not in str(caught.value)
    assert "auth.default_password" in str(caught.value)


def test_an_unknown_variable_is_reported_but_accepted() -> None:
    loaded = load(None, {"BASALT_AMQP_PROT": "1", "BASALT_SERVER": "http://x", "HOME": "/"})
    assert len(loaded.notes) == 1
    assert "BASALT_AMQP_PROT" in loaded.notes[0]
    assert "did you mean BASALT_AMQP_PORT?" in loaded.notes[0]
    with pytest.raises(InvalidConfigError, match="variable BASALT_AMQP_PORT"):
        load(None, {"BASALT_AMQP_PORT": "tcp://10.0.0.1:5672"})


def test_variables_support_lists_sizes_and_switches() -> None:
    config = load(
        None,
        {
            "BASALT_AUTH_LOOPBACK_USERS": "guest, admin",
            "BASALT_FILA_ENABLED": "no",
            "BASALT_MEMORY_CACHE_BYTES": "1.5 MiB",
            "BASALT_MEMORY_HIGH_WATERMARK": "25%",
        },
    ).config
    assert config.auth.loopback_users == ("guest", "admin")
    assert not config.fila.enabled
    assert config.memory.cache_bytes == MIB * 3 // 2
    assert config.memory.high_watermark.of(4 * GIB) == GIB


def test_printed_sizes_are_parsed_to_the_same_value() -> None:
    for text, size in (("0B", 0), ("1000B", 1000), ("4KiB", 4096), ("3MiB", 3 * MIB), ("2GiB", 2 * GIB)):
        assert ByteCount.parse(text) == size
        assert str(ByteCount(size)) == text
    for text in ("60%", "12.5%", "4GiB"):
        assert str(Share.parse(text)) == text


def test_printed_settings_are_a_valid_file_without_secrets(tmp_path: Path) -> None:
    first = load(None, {"BASALT_AUTH_DEFAULT_PASSWORD": "hunter2", "BASALT_AMQP_PORT": "0"})
    text = describe(first)
    assert "hunter2" not in text
    assert MASK in text
    assert "(BASALT_AMQP_PORT)" in text
    tomllib.loads(text)
    again = load(written(tmp_path, text), {"BASALT_AUTH_DEFAULT_PASSWORD": "hunter2"})
    assert again.config == first.config


def test_a_reload_applies_live_settings_and_names_the_others() -> None:
    before = load().config
    after = load(None, {"BASALT_LOG_LEVEL": "debug", "BASALT_AMQP_PORT": "1"}).config
    merged, taken, waiting = changed(before, after)
    assert taken == ["log.level"]
    assert waiting == ["amqp.port"]
    assert merged.log.level == "debug"
    assert merged.amqp.port == before.amqp.port


def test_every_setting_has_a_unique_name_a_description_and_a_valid_default() -> None:
    found = leaves()
    assert len({leaf.variable for leaf in found}) == len({leaf.flag for leaf in found}) == len(found) > 30
    assert all(leaf.meaning.endswith(".") for leaf in found)
    assert {leaf.key for leaf in found if leaf.secret} == {"auth.default_password"}
    assert any(leaf.reload is Reload.LIVE for leaf in found)
    Config().check()


def test_every_setting_is_read_by_the_broker() -> None:
    source = Path(__file__).parents[3] / "src" / "basaltmq"
    read: set[str] = set()
    for file in source.rglob("*.py"):
        if not file.name.startswith("config"):
            nodes = ast.walk(ast.parse(file.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    unread = {leaf.key for leaf in leaves() if leaf.path[-1] not in read}
    # `endpoints`, beside the tree, reads these for all listeners.
    unread -= {f"{section}.{name}" for section in ("amqp", "amqps", "admin", "fila") for name in ("host", "port")}
    assert not unread, "settings that change nothing"
