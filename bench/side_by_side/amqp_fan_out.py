"""A publisher to a fanout exchange as a program.

    python -m bench.side_by_side.amqp_fan_out PORT EXCHANGE COUNT SIZE WINDOW QUEUES

It binds the queues, publishes persistent messages with confirms, and prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from bench.amqp_wire import Wire, publish_bytes
from bench.side_by_side.loads import fan_out_queue
from pika import spec


def main() -> None:
    exchange = sys.argv[2]
    port, count, size, window, queues = (int(sys.argv[at]) for at in (1, 3, 4, 5, 6))
    with Wire(port) as wire:
        wire.call(1, spec.Exchange.Declare(exchange=exchange, type="fanout"), spec.Exchange.DeclareOk)
        for at in range(queues):
            name = fan_out_queue(exchange, at)
            wire.call(1, spec.Queue.Declare(queue=name, durable=True), spec.Queue.DeclareOk)
            wire.call(1, spec.Queue.Bind(queue=name, exchange=exchange), spec.Queue.BindOk)
        message = publish_bytes(exchange, "", bytes(size), delivery_mode=2)
        print(json.dumps({"rate": count / wire.publish_confirmed(message, count, window)}))


if __name__ == "__main__":
    main()
