"""Dead letters: report their causes, and redrive some of them.

python examples/dead_letters.py
"""

# %% Jobs that fail
from __future__ import annotations

import tempfile
from pathlib import Path

import basaltmq
from basaltmq.pipeline.dlq import RedriveJob, dead_letter_queues, dlq_report, redrive
from basaltmq.pipeline.reports.pages import dlq_page
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data = folder / "data"
with basaltmq.open(data) as db:
    prints = db.queue("prints", attempts_max=1, dead_letter_queue="prints.dead")
    for number in range(200):
        prints.enqueue(b"page %d" % number, fairness_key=f"tenant-{number % 3}")
    for number, message in enumerate(prints.lease(200)):
        if number % 4 == 0:
            prints.nack([message], "no paper" if number % 8 else "out of ink")
        else:
            prints.ack([message])

# %% Causes of the dead letters
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
report = dlq_report(spark, {"path": str(data)}, dead_letter_queues(str(data)))
for cause in report.causes:
    print(f"{cause.messages} of {cause.origin} died of {cause.reason}: {cause.error}")
(folder / "dead.html").write_text(dlq_page(report))

# %% There is ink again: redrive those jobs, ten per second
job = RedriveJob(
    path=str(data), queue="prints.dead", where="error = 'out of ink'", rate_per_s=10, checkpoint=str(folder / "redrive")
)
done = redrive(spark, job)
print(f"{done.redriven} of {done.dead} sent back by {done.run}; all of them as they were: {done.snapshot}")
print("open", folder / "dead.html")
spark.stop()
