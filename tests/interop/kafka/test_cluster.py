"""Requests of admin tools about leaders, replicas, log directories and the quorum."""

from __future__ import annotations

from typing import Any

from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient, batch_of
from tests.interop.server import Broker

from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

WAIT_S = 60.0


def test_leaders_need_no_election(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("elected", 2)
    admin = kafka_admin.AdminClient({"bootstrap.servers": f"127.0.0.1:{kafka.port('kafka')}"})
    wanted = [confluent_kafka.TopicPartition("elected", 1), confluent_kafka.TopicPartition("elected", 9)]
    found = admin.elect_leaders(confluent_kafka.ElectionType.PREFERRED, wanted).result(WAIT_S)
    codes = {place.partition: error.code() for place, error in found.items()}
    assert codes == {1: e.ELECTION_NOT_NEEDED, 9: e.UNKNOWN_TOPIC_OR_PARTITION}


def test_a_reassignment_may_name_this_broker_only(kafka: Broker) -> None:
    def partition(index: int, replicas: list[int] | None) -> dict[str, Any]:
        return {"partition_index": index, "replicas": replicas}

    partitions = [partition(0, [1]), partition(1, [2]), partition(2, [1, 2]), partition(3, None), partition(9, [1])]
    with RawClient(kafka.port("kafka")) as client:
        client.create("assigned", 4)
        asked = {"topics": [{"name": "assigned", "partitions": partitions}]}
        (found,) = client.ask(k.ALTER_PARTITION_REASSIGNMENTS, 1, asked)["responses"]
        assert [each["error_code"] for each in found["partitions"]] == [
            0,
            e.INVALID_REPLICA_ASSIGNMENT,
            e.INVALID_REPLICA_ASSIGNMENT,
            e.NO_REASSIGNMENT_IN_PROGRESS,
            e.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        assert client.ask(k.LIST_PARTITION_REASSIGNMENTS, 0, {"topics": None})["topics"] == []


def test_log_directories_show_the_sizes_of_partitions(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("sized", 2)
        client.produce("sized", batch_of(b"x" * 10_000))
        asked = {"topics": [{"topic": "sized", "partitions": [0, 1, 7]}, {"topic": "missing", "partitions": [0]}]}
        (found,) = client.ask(k.DESCRIBE_LOG_DIRS, 4, asked)["results"]
        assert found["log_dir"].startswith(str(kafka.data_dir))
        assert 0 < found["usable_bytes"] <= found["total_bytes"]
        (topic,) = found["topics"]
        sizes = {each["partition_index"]: each["partition_size"] for each in topic["partitions"]}
        assert sizes.keys() == {0, 1}
        assert 10_000 < sizes[0] < 20_000
        assert sizes[1] == 0
        (everything,) = client.ask(k.DESCRIBE_LOG_DIRS, 1, {"topics": None})["results"]
        assert "sized" in {each["name"] for each in everything["topics"]}


def test_the_quorum_has_one_voter(kafka: Broker) -> None:
    asked = {"topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]}
    with RawClient(kafka.port("kafka")) as client:
        found = client.ask(k.DESCRIBE_QUORUM, 2, asked)
        assert found["nodes"][0]["listeners"][0]["port"] == kafka.port("kafka")
        (partition,) = found["topics"][0]["partitions"]
        assert (partition["leader_id"], [each["replica_id"] for each in partition["current_voters"]]) == (1, [1])
        asked["topics"][0]["topic_name"] = "other"
        (partition,) = client.ask(k.DESCRIBE_QUORUM, 1, asked)["topics"][0]["partitions"]
        assert partition["error_code"] == e.UNKNOWN_TOPIC_OR_PARTITION


def test_resources_with_configs_are_listed(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("listed")

        def resources(version: int, *types: int) -> set[tuple[str, int]]:
            found = client.ask(k.LIST_CONFIG_RESOURCES, version, {"resource_types": list(types)})
            return {(each["resource_name"], each["resource_type"]) for each in found["config_resources"]}

        assert {("listed", 2), ("1", 4)} <= resources(1)
        assert resources(1, 4) == {("1", 4)}
        assert ("listed", 2) in resources(1, 2)
        assert resources(0) == set()


def test_partitions_of_topics_are_described_in_pages(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        counts = {"paged-a": 3, "paged-b": 1, "paged-c": 5}
        for name, count in counts.items():
            client.create(name, count)
        expected = {(name, number) for name, count in counts.items() for number in range(count)}

        def pages(limit: int, names: list[str]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
            """Return the described partitions, and names with errors."""
            found: list[tuple[str, int]] = []
            errors: list[tuple[str, int]] = []
            cursor: dict[str, Any] | None = None
            for _ in range(1000):
                asked = {"topics": [{"name": name} for name in names], "response_partition_limit": limit}
                response = client.ask(k.DESCRIBE_TOPIC_PARTITIONS, 0, {**asked, "cursor": cursor})
                page = [(t["name"], p["partition_index"]) for t in response["topics"] for p in t["partitions"]]
                assert len(page) <= limit
                found += page
                errors += [(t["name"], t["error_code"]) for t in response["topics"] if t["error_code"]]
                cursor = response["next_cursor"]
                if cursor is None:
                    return found, errors
            raise AssertionError("the pages have no end")

        for limit in (1, 2, 3, 4, 2000):
            found, errors = pages(limit, ["paged-c", "paged-a", "paged-b", "paged-0"])
            assert found == sorted(expected), limit
            assert set(errors) == {("paged-0", e.UNKNOWN_TOPIC_OR_PARTITION)}
            every, errors = pages(limit, [])
            assert expected <= set(every)
            assert len(every) == len(set(every))
            assert errors == []
