"""Set before numpy is imported: small matrices on many BLAS threads take up to 70 times as long on a busy machine."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
