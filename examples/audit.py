"""Audit a store against its archive, plant a fault, and audit again.

python examples/audit.py
"""

# %% A store, and an archive of it
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.audit.audit import AuditJob, audit
from basaltmq.pipeline.reports.pages import audit_page
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data, target = folder / "data", folder / "archive"
orders.publish(data, 5_000)
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
archive(spark, ArchiveJob(source={"path": str(data), "subscribe": "orders"}, target=str(target)))

# %% No findings
job = AuditJob(path=str(data), archive=str(target))
print(audit(spark, job).findings)

# %% Delete a file: the audit finds it
next(target.rglob("*.parquet")).unlink()
result = audit(spark, job)
for finding in result.findings:
    print(finding.severity, finding.kind, finding.subject, finding.detail, sep="; ")
(folder / "audit.html").write_text(audit_page(result))
print("open", folder / "audit.html")
spark.stop()
