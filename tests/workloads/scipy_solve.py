import numpy as np
from scipy import integrate, optimize, sparse
from scipy.sparse.linalg import spsolve

assert abs(optimize.brentq(lambda x: x**2 - 2, 0, 2) - 2**0.5) < 1e-9
assert abs(integrate.quad(np.sin, 0, np.pi)[0] - 2) < 1e-9
assert np.allclose(spsolve(sparse.eye(20, format="csc") * 4, np.ones(20)), 0.25)
print("ok scipy_solve")
