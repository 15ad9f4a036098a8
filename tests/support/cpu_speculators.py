"""The `speculators` command on a machine without an accelerator: its trainer asks for device 0, and waits for it.

Everything else is speculators' own: ``python cpu_speculators.py train --verifier-name-or-path ...``.
"""

import torch
from speculators.cli import app
from speculators.train import trainer

if __name__ == "__main__":
    if not torch.accelerator.is_available():
        trainer.get_local_rank = lambda: torch.device("cpu")
        torch.accelerator.synchronize = lambda *_: None
    app(prog_name="speculators")
