import multiprocessing as mp

context = mp.get_context("fork")
SIZE = 3


def scale(x):
    return x * SIZE


with context.Pool(2) as pool:
    assert pool.map(scale, [1, 2, 3]) == [3, 6, 9]
queue, lock = context.Queue(), context.Lock()


def put():
    with lock:
        queue.put("from child")


worker = context.Process(target=put)
worker.start()
assert queue.get(timeout=10) == "from child"
worker.join()
assert worker.exitcode == 0
shared = context.Array("i", [1, 2, 3])
assert shared[:] == [1, 2, 3]
print("ok multiprocessing_fork")
