import io

import pandas as pd

frame = pd.DataFrame({"key": list("abab"), "value": [1, 2, 3, 4]})
assert frame.groupby("key")["value"].sum().to_dict() == {"a": 4, "b": 6}
text = io.StringIO()
frame.to_csv(text, index=False)
text.seek(0)
assert pd.read_csv(text).equals(frame)
assert frame.merge(frame, on="key").shape == (8, 3)
print("ok pandas_frame")
