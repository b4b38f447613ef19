"""Commands of operators that RocketMQ clients follow: the backoff of a group, and offsets reset by time."""

from __future__ import annotations

import time

from click.testing import CliRunner, Result
from tests.interop.rocketmq.raw import Client, bodies, handle_of, message, settings_of_consumer
from tests.interop.server import Broker

from basaltmq.cli.main import main
from basaltmq.wire import rocketmq_wire_pb2 as wire


def test_commands_set_the_backoff_of_a_group(client: Client, rocketmq: Broker) -> None:
    done = basalt(
        rocketmq, "rocketmq", "group", "set", "slow", "--max-attempts", "4", "--backoff-s", "2", "--backoff-s", "9"
    )
    assert done.exit_code == 0, done.output
    with client.telemetry() as telemetry:
        policy = telemetry.send(settings_of_consumer("slow", wire.PUSH_CONSUMER)).settings.backoff_policy
    assert policy.max_attempts == 4
    assert [each.seconds for each in policy.customized_backoff.next] == [2, 9]


def test_an_operator_resets_a_group_by_time(client: Client, rocketmq: Broker) -> None:
    client.route("rewound")
    for text in (b"old", b"new"):
        assert client.send(message("rewound", text)).status.code == wire.OK
        # The log has times in milliseconds, so the two messages need different ones.
        time.sleep(0.05)
    _, found = client.receive("rewinder", "rewound")
    since_ms = found[1].system_properties.store_timestamp.ToMilliseconds()
    assert client.ack("rewinder", "rewound", *map(handle_of, found)).status.code == wire.OK
    assert client.receive("rewinder", "rewound")[0] == wire.MESSAGE_NOT_FOUND
    done = basalt(rocketmq, "topic", "groups", "rewinder", "--topic", "rewound", "--reset", f"time:{since_ms}")
    assert done.exit_code == 0, done.output
    assert bodies(client.receive("rewinder", "rewound")[1]) == [b"new"]
    assert basalt(rocketmq, "topic", "groups", "rewinder", "--topic", "rewound", "--reset", "time:x").exit_code != 0


def basalt(broker: Broker, *words: str) -> Result:
    return CliRunner(env={"BASALT_SERVER": broker.url("admin")}).invoke(main, list(words))
