import os

os.environ["OPENBLAS_NUM_THREADS"] = "4"
import numpy as np

grid = np.arange(160000, dtype=float).reshape(400, 400) % 7
product = grid @ grid.T
assert int(product.trace()) == 2079987
assert np.allclose(np.linalg.inv(np.eye(50) * 2), np.eye(50) / 2)
assert np.random.default_rng().random() != np.random.default_rng().random()
print("ok numpy_blas")
