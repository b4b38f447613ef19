"""The list of families: complete, stable on disk, and found by label."""

from __future__ import annotations

import pytest

from basaltmq.errors import UnknownFamilyError
from basaltmq.store.families import BY_LABEL, Family, family_of

pytestmark = pytest.mark.spec("A1")


def test_all_required_families_exist_under_their_labels() -> None:
    required = {
        *("default", "configured_objects", "configured_object_hierarchy", "preferences"),
        *("message_content", "xids", "version", "amqp_1_0_links"),
        *("messages", "leases", "lease_expiry", "queues", "state"),
    }
    assert required <= {family.label for family in Family}


def test_the_default_family_is_first_and_numbers_are_indexes() -> None:
    assert [int(family) for family in Family] == list(range(len(Family)))
    assert next(iter(Family)) is Family.DEFAULT


def test_labels_are_unique_and_the_lower_case_name() -> None:
    assert len(BY_LABEL) == len(Family)
    for family in Family:
        assert family.label == family.name.lower()


@pytest.mark.spec("A10")
def test_a_label_finds_its_family_and_an_unknown_label_lists_the_known_ones() -> None:
    assert family_of("content_refs") is Family.CONTENT_REFS
    for label in ("", "Messages", "content_refs ", "no_such"):
        with pytest.raises(UnknownFamilyError, match=r"unknown family .*; known families: .*content_refs"):
            family_of(label)
