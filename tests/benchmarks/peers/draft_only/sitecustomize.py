"""On PYTHONPATH of a benchmarked server: keeps a peer to the draft, whose sites are what eagle-trace records.

SGLang switches each of them on for the target as well; that would charge them for tensors nobody compares here.
SGLang's own dump fails on a model that returns a tuple with a list in it, as every EAGLE-3 draft does: mended here as
well, so that it can be measured.
"""

import os
from itertools import chain

if os.environ.get("BENCH_PEERS_DRAFT_ONLY"):
    from eagle_trace_sglang import plugin

    load = plugin.load

    def loaded() -> None:
        load()
        import sys

        if plugin.SCHEDULER not in sys.modules:
            return
        from sglang.srt.model_executor import model_runner

        register = model_runner.maybe_register_debug_tensor_dump_hook
        start = model_runner.dumper.register_non_intrusive_dumper
        init = model_runner.ModelRunner.init_msprobe

        def register_draft(*, is_draft_worker: bool, **rest: object) -> None:
            if is_draft_worker:
                register(is_draft_worker=is_draft_worker, **rest)

        def start_draft(model: object) -> None:
            if "Eagle3" in type(model).__name__:
                start(model)

        def init_draft(self: object) -> None:
            self.msprobe_debugger = None
            if self.is_draft_worker:
                init(self)

        from sglang.srt.debug_utils.tensor_dump_forward_hook import TensorDumper

        add = TensorDumper.add_tensor

        def add_flat(self: object, name: str, item: object) -> None:
            if isinstance(item, tuple | list):
                item = list(chain.from_iterable(part if isinstance(part, tuple | list) else [part] for part in item))
            add(self, name, item)

        TensorDumper.add_tensor = add_flat
        model_runner.maybe_register_debug_tensor_dump_hook = register_draft
        model_runner.dumper.register_non_intrusive_dumper = start_draft
        model_runner.ModelRunner.init_msprobe = init_draft

    plugin.load = loaded
