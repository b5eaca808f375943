import polars as pl

frame = pl.DataFrame({"key": ["a", "b", "a"], "value": [1, 2, 3]})
lazy = frame.lazy().group_by("key").agg(pl.col("value").sum()).sort("key").collect()
assert lazy["value"].to_list() == [4, 2]
print("ok polars_frame")
