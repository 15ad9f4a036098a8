"""Two processes that train one draft under DistributedDataParallel and record it: ``python -m`` TARGET DRAFT OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from eagle_trace_speculators import recording
from tests.support.tiny_speculators import Pair, random_prompts
from tests.support.training import Loop, collate, sample, trainable

WORLD = 2


def train(rank: int, pair: Pair, out: Path) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=WORLD)
    documents = random_prompts([9, 7], seed=rank)
    batch = collate([sample(pair, ids, 3) for ids in documents])
    loop = Loop(DistributedDataParallel(trainable(pair), find_unused_parameters=True))
    with recording(loop.model, out=out / "t.trace", batches=1, dataset=documents, level="stats"):
        loop.step(batch)
    loop.step(batch)
    destroy_process_group()


if __name__ == "__main__":
    target, draft, folder = (Path(argument) for argument in sys.argv[1:])
    # forked, so that the hosts are imported once
    torch.multiprocessing.start_processes(train, (Pair(target, draft), folder), nprocs=WORLD, start_method="fork")
