"""The processor of a tiny Kimi-K2.5: transformers' own, with what SGLang asks of the published one."""

from types import SimpleNamespace

from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor


class TinyProcessor(Kimi_K25Processor):
    media_processor = SimpleNamespace(
        media_proc_cfg={
            "patch_size": 14,
            "merge_kernel_size": 2,
            "in_patch_limit": 256,
            "patch_limit_on_one_side": 16,
            "fixed_output_tokens": None,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
    )
