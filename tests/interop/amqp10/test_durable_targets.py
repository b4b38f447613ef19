"""Durable targets: a sender with receiver settle mode `second` publishes exactly once, over kills of both sides."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.interop.amqp10.raw import RawClient
from tests.interop.amqp10.test_durable_links import opened
from tests.interop.amqp10.test_protocol import declare, depth, receive
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import performatives as p


def attach(client: RawClient, address: str, unsettled: dict[Any, Any] | None = None, **fields: Any) -> p.Attach:
    target = p.Target(address=address, durable=p.UNSETTLED_STATE, expiry_policy="never")
    mode = fields.pop("rcv_settle_mode", p.SECOND)
    answer = client.attach_sender(
        0, None, target=target, name="orders", rcv_settle_mode=mode, unsettled=unsettled, **fields
    )
    if answer.target is not None:
        client.take(p.Flow)
    return answer


def outcome(client: RawClient, delivery_id: int) -> p.Disposition:
    while True:
        found = client.take(p.Disposition)
        if found.first <= delivery_id <= (found.first if found.last is None else found.last):
            return found


def settle(client: RawClient, delivery_id: int) -> None:
    client.send(p.Disposition(role=p.SENDER, first=delivery_id, settled=True))


def tags(answer: p.Attach) -> set[bytes]:
    return set(answer.unsettled or ())


@pytest.mark.spec("G2", "A8")
@pytest.mark.parametrize("is_killed", [False, True], ids=["lost", "killed"])
def test_a_message_whose_outcome_was_lost_is_not_published_twice(own_broker: Broker, is_killed: bool) -> None:
    broker = own_broker
    address = declare(broker, "t-once")
    client = opened(broker, "shop")
    answer = attach(client, address)
    assert (answer.target.durable, answer.target.expiry_policy) == (p.UNSETTLED_STATE, "never")
    for number in range(3):
        client.transfer(0, number, b"%d" % number, delivery_tag=b"tag-%d" % number)
    found = outcome(client, 2)
    assert not found.settled
    assert isinstance(found.state, p.Accepted)
    settle(client, 0)
    client.is_alive()
    client.sock.close()
    if is_killed:
        broker.kill()
        broker.start()
    client = opened(broker, "shop")
    # The client has settled tag-0, has not heard of tag-1 and tag-2, and was about to send tag-3.
    answer = attach(client, address, {b"tag-1": None, b"tag-2": None, b"tag-3": None})
    assert tags(answer) == {b"tag-1", b"tag-2"}
    assert not answer.incomplete_unsettled
    client.transfer(0, 0, b"1", delivery_tag=b"tag-1", resume=True)
    assert isinstance(outcome(client, 0).state, p.Accepted)
    settle(client, 0)
    client.transfer(0, 1, delivery_tag=b"tag-2", resume=True, settled=True, state=p.Accepted(), payload=b"")
    client.transfer(0, 2, b"3", delivery_tag=b"tag-3")
    assert isinstance(outcome(client, 2).state, p.Accepted)
    settle(client, 2)
    client.send(p.Detach(handle=0))
    client.take(p.Detach)
    assert tags(attach(client, address)) == set()
    client.sock.close()
    assert depth(broker, "t-once") == 4
    reader = opened(broker, "reader")
    reader.attach_receiver(1, address)
    reader.credit(1, 10)
    assert [payload[-1:] for _, payload in receive(reader, 4)] == [b"0", b"1", b"2", b"3"]
    reader.sock.close()


@pytest.mark.spec("G2", "A8")
def test_random_kills_of_both_sides_lose_and_repeat_nothing(own_broker: Broker) -> None:
    broker = own_broker
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    address = declare(broker, "t-random")
    unsettled: dict[bytes, bytes] = {}
    waiting = [b"%03d" % number for number in range(60)]
    done = 0
    for _ in range(200):
        client = opened(broker, "shop")
        stored = tags(attach(client, address, dict.fromkeys(unsettled) or None))
        next_id = 0
        for tag in stored & unsettled.keys():
            client.transfer(0, next_id, delivery_tag=tag, resume=True, settled=True, payload=b"")
            next_id += 1
            del unsettled[tag]
            done += 1
        batch = [*unsettled, *[b"tag-" + waiting.pop(0) for _ in range(min(len(waiting), chance.randrange(1, 12)))]]
        sent: dict[int, bytes] = {}
        for tag in batch:
            unsettled[tag] = tag[4:]
            client.transfer(0, next_id, tag[4:], delivery_tag=tag)
            sent[next_id] = tag
            next_id += 1
        heard = 0
        while heard < chance.randrange(len(batch) + 1):
            found = client.take(p.Disposition)
            assert isinstance(found.state, p.Accepted), seed
            for each in range(found.first, (found.first if found.last is None else found.last) + 1):
                heard += 1
                settle(client, each)
                del unsettled[sent[each]]
                done += 1
        client.sock.close()
        if chance.random() < 0.15:
            broker.kill()
            broker.start()
        if not waiting and not unsettled:
            break
    assert done == 60, seed
    assert depth(broker, "t-random") == 60, seed
    reader = opened(broker, "reader")
    reader.attach_receiver(1, address)
    reader.credit(1, 100)
    assert sorted(payload[-3:] for _, payload in receive(reader, 60)) == [b"%03d" % number for number in range(60)], (
        seed
    )
    reader.sock.close()


@pytest.mark.spec("G2")
def test_a_durable_target_is_stolen_closed_and_not_kept_in_mode_first(own_broker: Broker) -> None:
    broker = own_broker
    address = declare(broker, "t-steal")
    first, second = opened(broker, "shop"), opened(broker, "shop")
    attach(first, address)
    first.transfer(0, 0, b"x", delivery_tag=b"t")
    outcome(first, 0)
    assert tags(attach(second, address, {b"t": None})) == {b"t"}
    assert first.error(p.Detach) == "amqp:link:stolen"
    # Closing the link deletes its state.
    second.send(p.Detach(handle=0, closed=True))
    second.take(p.Detach)
    assert tags(attach(second, address, {b"t": None})) == set()
    second.send(p.Detach(handle=0, closed=True))
    second.take(p.Detach)
    assert attach(second, address, rcv_settle_mode=p.FIRST).target.durable == p.NONE
    first.sock.close()
    second.sock.close()


@pytest.mark.spec("G2")
def test_an_unsettled_map_that_does_not_fit_is_incomplete(own_broker: Broker) -> None:
    broker = own_broker
    address = declare(broker, "t-many")
    client = opened(broker, "shop")
    attach(client, address)
    for number in range(300):
        client.transfer(0, number, b"x", delivery_tag=b"tag-%d" % number)
    outcome(client, 299)
    client.sock.close()
    client = RawClient(broker.port())
    client.login()
    client.send(p.Open(container_id="shop", max_frame_size=8192))
    client.take(p.Open)
    client.begin(0)
    answer = attach(client, address, {b"tag-0": None}, incomplete_unsettled=True)
    assert answer.incomplete_unsettled
    assert 0 < len(tags(answer)) < 300
    # The broker knows the deliveries that are not in the map, too.
    client.transfer(0, 0, b"x", delivery_tag=b"tag-299", resume=True)
    assert isinstance(outcome(client, 0).state, p.Accepted)
    client.sock.close()
    assert depth(broker, "t-many") == 300
