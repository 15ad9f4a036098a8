"""Lets vLLM's model runner V2 run without a GPU: first in PYTHONPATH, together with ``TRITON_INTERPRET=1``.

V2's kernels are written in Triton, which has no CPU backend in its wheels; Triton's interpreter runs them in Python.
vLLM must only believe that there is a backend.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends

    triton.backends.backends.setdefault("cpu", triton.backends.backends["nvidia"])
