import os
import tempfile

import matplotlib.pyplot as plt

path = os.path.join(tempfile.mkdtemp(), "trend.png")
figure, axes = plt.subplots(figsize=(4, 3))
axes.plot([1, 2, 3, 4], [3, 1, 4, 2], marker="o", label="Größe")
axes.legend()
axes.set_title(r"Weekly $\alpha^2$")
figure.savefig(path, dpi=90)
with open(path, "rb") as image:
    assert image.read(8) == b"\x89PNG\r\n\x1a\n"
assert os.path.getsize(path) > 3000
print("ok matplotlib_savefig")
