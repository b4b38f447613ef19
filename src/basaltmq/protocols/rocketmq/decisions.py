"""EndTransaction: the decision of a producer. It is answered after the sync."""

from __future__ import annotations

from basaltmq.ids import ID_BYTES
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.rules.names import topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.wire import rocketmq_wire_pb2 as wire


def end_transaction(
    request: wire.EndTransactionRequest, caller: Caller
) -> ImmediateFuture[wire.EndTransactionResponse] | wire.EndTransactionResponse:
    host = caller.host
    name = topic_name(request.topic)
    caller.check_write(name)
    if request.resolution not in (wire.COMMIT, wire.ROLLBACK):
        raise Refused(wire.BAD_REQUEST, "a transaction ends with COMMIT or ROLLBACK")
    record_id = _record_id(request.transaction_id)
    decision = host.transactions.decision(record_id)
    if decision == request.resolution:
        return wire.EndTransactionResponse(status=OK)
    with host.guard():
        half = None if decision is not None else host.transactions.find(record_id)
    if half is None:
        raise Refused(wire.INVALID_TRANSACTION_ID, f"transaction {request.transaction_id!r:.80} is not open")
    if half.scheduled.topic != name:
        raise Refused(wire.INVALID_TRANSACTION_ID, f"transaction {request.transaction_id} is not one of topic {name!r}")
    answer: ImmediateFuture[wire.EndTransactionResponse] = ImmediateFuture()

    def synced(error: BaseException | None) -> None:
        answer.set_result(wire.EndTransactionResponse(status=OK if error is None else status_of(error)))
        host.schedule.due_at(0)

    host.transactions.decide(host.rows, record_id, half, request.resolution)
    host.write_soon(synced)
    return answer


def _record_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != ID_BYTES:
        raise Refused(wire.INVALID_TRANSACTION_ID, f"{text!r:.80} is not a transaction id of this broker")
    return found
