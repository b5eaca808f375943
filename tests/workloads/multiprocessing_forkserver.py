import math
import multiprocessing as mp

with mp.get_context("forkserver").Pool(2) as pool:
    assert pool.map(math.sqrt, [4, 9]) == [2.0, 3.0]
print("ok multiprocessing_forkserver")
