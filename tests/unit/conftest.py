"""Set before torch is imported: a process for each core runs tests, so threads would only wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
