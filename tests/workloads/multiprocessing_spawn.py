import math
import multiprocessing as mp
from multiprocessing import shared_memory

with mp.get_context("spawn").Pool(2) as pool:
    assert pool.map(math.factorial, [3, 4]) == [6, 24]
block = shared_memory.SharedMemory(create=True, size=4096)
block.buf[:5] = b"hello"
again = shared_memory.SharedMemory(name=block.name)
assert bytes(again.buf[:5]) == b"hello"
again.close()
block.close()
block.unlink()
print("ok multiprocessing_spawn")
