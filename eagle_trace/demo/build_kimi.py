"""Rebuild the demo's Kimi-K2.5 pair: `python -m eagle_trace.demo.build_kimi OUT`.

As `eagle_trace.demo.build`, with a byte-level DeepSeek-V3 (latent attention, experts) as the target, which then becomes
the language model of a tiny Kimi-K2.5. Nobody trains its vision tower: it is there because SGLang's class loads one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_trace.demo import build as base
from eagle_trace.demo import kimi
from eagle_trace.demo.build import Budget, log
from eagle_trace.demo.corpus import BOS, EOS, PAD, corpus, write_tokenizer

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, LlamaConfig, PreTrainedModel

LAYERS = 6
AUX_LAYERS = (2, 3, 4)
HIDDEN = 96
#: what the shipped models were made with
BUDGET = Budget(target_steps=700, answers=600, draft_steps=900)
VERIFIER_NAME = "eagle-trace-demo-kimi"
IMAGE_ID, VIDEO_ID = PAD + 1, PAD + 2
_SHAPE: dict[str, Any] = {
    "vocab_size": base.VOCAB, "hidden_size": HIDDEN, "num_attention_heads": 4, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "bos_token_id": BOS, "eos_token_id": EOS,
    "pad_token_id": PAD,
}  # fmt: skip


def text_config() -> DeepseekV3Config:
    """A DeepSeek-V3 of about 0.7M parameters.

    transformers norms the latents with 1e-6 whatever the config says, SGLang with the config's: here both are that.
    """
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **_SHAPE, **kimi.LATENT, num_hidden_layers=LAYERS, num_key_value_heads=4, intermediate_size=192,
        rope_parameters=dict(kimi.ROPE), rms_norm_eps=1e-6,
    )  # fmt: skip


def draft_config() -> LlamaConfig:
    """The draft's one layer: a Llama's, as SGLang's `LlamaForCausalLMEagle3` serves it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **_SHAPE, num_hidden_layers=1, num_key_value_heads=2, head_dim=24, intermediate_size=192, rms_norm_eps=1e-5
    )


def build(out: Path, budget: Budget) -> None:
    """Train both models and write both folders under `out`."""
    base.prepare()
    from transformers import DeepseekV3ForCausalLM

    documents = corpus()
    fresh = DeepseekV3ForCausalLM._from_config(text_config(), experts_implementation="eager")
    text = base.train_target(fresh, documents, budget)
    save_target(text, out / "target")
    answers = base.answer_prompts(text, documents, budget.answers)
    log(f"{len(answers)} answers")
    features = base.target_features(text, answers, AUX_LAYERS)
    draft = base.train_draft(out / "target", draft_config(), AUX_LAYERS, answers, features, budget)
    base.save_draft(draft, out / "draft", VERIFIER_NAME)
    log(f"wrote {out}")


def save_target(text: PreTrainedModel, folder: Path) -> None:
    """The trained language model inside a Kimi-K2.5, in bfloat16, as the published checkpoint looks."""
    import torch
    from transformers import AutoModelForImageTextToText

    config = kimi.config(text.config, image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
    config.dtype = torch.bfloat16
    whole = AutoModelForImageTextToText.from_config(config)
    whole.get_decoder().load_state_dict(text.get_decoder().state_dict())
    whole.get_output_embeddings().load_state_dict(text.get_output_embeddings().state_dict())
    kimi.save_as_published(whole.to(torch.bfloat16), folder)
    kimi.write_processor(folder, write_tokenizer(folder, (kimi.IMAGE_TOKEN, kimi.VIDEO_TOKEN)))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: `python -m eagle_trace.demo.build_kimi OUT [--quick]`."""
    parser = argparse.ArgumentParser(prog="python -m eagle_trace.demo.build_kimi", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write target/ and draft/ into")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    args = parser.parse_args(argv)
    build(args.out, Budget(target_steps=20, answers=20, draft_steps=5) if args.quick else BUDGET)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
