import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed

with ThreadPoolExecutor(4) as pool:
    assert sorted(f.result() for f in as_completed([pool.submit(pow, 2, n) for n in range(5)])) == [1, 2, 4, 8, 16]
with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool:
    assert list(pool.map(abs, [-1, 2, -3])) == [1, 2, 3]
print("ok concurrent_futures")
