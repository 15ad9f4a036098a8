"""Starts Python modules that need SGLang from a process that has imported it already, so that tests need not wait.

A start of SGLang is mostly imports, the same ones in each of its processes. `server` imports them once and forks for
every start; `client` is what a test runs in place of ``python -m MODULE``: it hands its arguments, environment, folder
and output over, passes signals on, and ends as the module ended. When the client is killed, everything goes that it
started.
"""
