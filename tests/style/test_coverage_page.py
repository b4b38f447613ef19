"""The coverage page matches the marks, and the marks name existing ids."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.coverage_page import IDS, PAGE, ROOT, UnknownIdError, collect, marked_tests, page

COUNTS = {"A": 12, "B": 10, "C": 14, "D": 5, "E": 11, "F": 3, "G": 4, "H": 4, "I": 5, "P": 15}


def test_the_list_of_ids_is_complete() -> None:
    assert list(IDS) == [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.exists(), "run make coverage-page"
    assert PAGE.read_text() == page(collect(ROOT / "tests")), "the marks have changed: run make coverage-page"


def test_marks_of_functions_classes_and_modules_are_found() -> None:
    code = """
pytestmark = [pytest.mark.spec("A1"), pytest.mark.slow]

@pytest.mark.spec("A2", "A3")
@pytest.mark.promise("P1")
@pytest.mark.parametrize("x", ["A9"])
def test_one(): ...

@pytest.mark.promise("P2")
class TestMany:
    @pytest.mark.spec("B1")
    async def test_two(self): ...
    def helper(self): ...

def test_plain(): ...

TestMachine = pytest.mark.spec("B2")(Machine.TestCase)
TestMachine.settings = settings(max_examples=5)
"""
    assert dict(marked_tests(ast.parse(code))) == {
        "test_one": {"A1", "A2", "A3", "P1"},
        "test_two": {"A1", "P2", "B1"},
        "test_plain": {"A1"},
        "TestMachine": {"A1", "B2"},
    }


def test_an_id_that_is_not_in_the_specification_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text('@pytest.mark.spec("Z9")\ndef test_a(): ...\n')
    with pytest.raises(UnknownIdError, match=r"tests/test_x.py::test_a is marked with 'Z9'"):
        collect(tmp_path / "tests")


def test_an_id_is_covered_only_by_a_test_through_an_interface_of_users(tmp_path: Path) -> None:
    for name, code in (
        ("unit/store/test_inside.py", '@pytest.mark.spec("A1", "A2")\ndef test_inside(): ...\n'),
        ("unit/cli/test_outside.py", '@pytest.mark.spec("A2")\ndef test_outside(): ...\n'),
        ("crash/test_opened.py", 'import basaltmq\n\n@pytest.mark.spec("A3")\ndef test_opened(): ...\n'),
        ("crash/test_below.py", 'import basaltmq.store.api\n\n@pytest.mark.spec("A4")\ndef test_below(): ...\n'),
    ):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    text = page(collect(tmp_path / "tests"))
    assert "| A1 | internal | 1 | `tests/unit/store/test_inside.py::test_inside` |" in text
    assert "| A2 | covered | 2 | `tests/unit/cli/test_outside.py::test_outside` |" in text
    assert "| A3 | covered | 1 | `tests/crash/test_opened.py::test_opened` |" in text
    assert "| A4 | internal | 1 |" in text
    assert "| A5 | open | 0 | |" in text
    assert f"2 of {len(IDS)} ids are covered" in text
