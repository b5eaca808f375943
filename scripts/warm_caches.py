"""Builds what matplotlib and IPython would otherwise write at first use, in MPLCONFIGDIR and IPYTHONDIR (scripts/setup.sh)."""
import os

import matplotlib.font_manager
import matplotlib.pyplot as plt

plt.figure().savefig(os.devnull, format="png")
assert any(n.startswith("fontlist") for n in os.listdir(os.environ["MPLCONFIGDIR"])), "matplotlib kept no font list"

from IPython.core.profiledir import ProfileDir  # noqa: E402
from IPython.paths import get_ipython_dir  # noqa: E402

ProfileDir.create_profile_dir_by_name(get_ipython_dir(), "default")
