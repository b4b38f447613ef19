"""A Celery application for tests; BASALT_TEST_URL says where the broker is."""

from __future__ import annotations

import os
from typing import Any

import celery

app: Any = celery.Celery("basalt-test", broker=os.environ.get("BASALT_TEST_URL", ""), backend="rpc://")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=2,
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_default_queue="celery-basalt",
    broker_pool_limit=2,
)


@app.task(name="add")  # type: ignore[untyped-decorator]
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="flaky", bind=True, max_retries=3, default_retry_delay=0)  # type: ignore[untyped-decorator]
def flaky(self: Any, fail_times: int) -> int:
    """Fail this many times, then return the number of attempts."""
    retries: int = self.request.retries
    if retries < fail_times:
        raise self.retry(countdown=0)
    return retries
