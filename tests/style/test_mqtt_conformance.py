"""The conformance page of MQTT matches the marks, and the marks name existing statements."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.coverage_page import ROOT
from tests.mqtt_conformance import PAGE, UnknownStatementError, collect, page, read_statements

STATEMENTS = read_statements()


def test_the_page_is_up_to_date() -> None:
    expected = page(STATEMENTS, collect(ROOT / "tests", STATEMENTS))
    assert PAGE.read_text() == expected, "the marks have changed: run make conformance-page"


def test_section_numbers_have_only_the_gap_of_the_standard() -> None:
    sections: dict[str, list[int]] = {}
    for name in STATEMENTS:
        section, number = name.rsplit("-", 1)
        sections.setdefault(section, []).append(int(number))
    gaps = {
        section: missing
        for section, numbers in sections.items()
        if (missing := set(range(1, max(numbers) + 1)) - set(numbers))
    }
    assert gaps == {"MQTT-2.2.1": {1}}
    assert all(numbers == sorted(numbers) for numbers in sections.values())


def test_an_unknown_statement_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text('@pytest.mark.mqtt("MQTT-9.9.9-9")\ndef test_a(): ...\n')
    with pytest.raises(UnknownStatementError, match=r"tests/test_x.py::test_a is marked with 'MQTT-9.9.9-9'"):
        collect(tmp_path / "tests", STATEMENTS)


def test_the_page_names_tests_that_are_marked_and_open_statements(tmp_path: Path) -> None:
    (tmp_path / "tests/unit/protocols/mqtt/wire").mkdir(parents=True)
    (tmp_path / "tests/test_x.py").write_text(
        '@pytest.mark.mqtt("MQTT-3.1.0-1")\n@pytest.mark.spec("A1")\ndef test_a(): ...\n'
    )
    (tmp_path / "tests/unit/protocols/mqtt/wire/test_y.py").write_text(
        '@pytest.mark.mqtt("MQTT-3.1.0-1", "MQTT-1.5.4-2")\ndef test_b(): ...\n'
    )
    text = page(STATEMENTS, collect(tmp_path / "tests", STATEMENTS))
    assert (
        "| MQTT-3.1.0-1 | The first packet of a client is CONNECT. | served | 2 | `tests/test_x.py::test_a` |" in text
    )
    assert "| MQTT-3.1.0-2 | A second CONNECT is a protocol error and ends the connection. | open | 0 | |" in text
    assert "| MQTT-3.2.2-4 | A client without a session closes if Session Present is 1. | client | 0 | |" in text
    codec = "tests/unit/protocols/mqtt/wire/test_y.py::test_b"
    assert f"| MQTT-1.5.4-2 | Strings do not contain U+0000. | codec | 1 | `{codec}` |" in text
    assert "1 are served, 1 are tested in the codec, " in text
