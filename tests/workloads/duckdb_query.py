import os
import tempfile

import duckdb

with duckdb.connect(os.path.join(tempfile.mkdtemp(), "x.duckdb")) as db:
    db.execute("create table t as select range as n from range(100000)")
    assert db.execute("select sum(n) from t").fetchone() == (4999950000,)
print("ok duckdb_query")
