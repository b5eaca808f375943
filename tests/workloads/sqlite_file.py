import os
import sqlite3
import tempfile

path = os.path.join(tempfile.mkdtemp(), "x.db")
with sqlite3.connect(path) as db:
    db.execute("pragma journal_mode=wal")
    db.execute("create table t (n integer, s text)")
    db.executemany("insert into t values (?, ?)", [(n, "é") for n in range(1000)])
with sqlite3.connect(path) as db:
    assert db.execute("select count(*), sum(n) from t").fetchone() == (1000, 499500)
print("ok sqlite_file")
