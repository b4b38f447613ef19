"""Client for the lease queues of a broker.

from basaltmq.client import Client, Worker

with Client("localhost:5555") as client:
    client.create_queue("jobs")  # QueueExistsError if it exists
    client.enqueue("jobs", b"work")
    Worker(client, "jobs", handle, concurrency=8).run()
"""

from basaltmq.client.async_client import AsyncClient
from basaltmq.client.async_worker import AsyncWorker
from basaltmq.client.client import Client
from basaltmq.client.leased import Leased
from basaltmq.client.worker import Worker
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle.handler_failure import Reject

__all__ = ["AsyncClient", "AsyncWorker", "Client", "Draft", "Leased", "Reject", "Worker"]
