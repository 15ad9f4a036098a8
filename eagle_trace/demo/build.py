"""Rebuild the demo models: `python -m eagle_trace.demo.build OUT`.

Needs what `pip install speculators` brings and nothing else: the corpus is the reference text inside CPython
(`pydoc_data.topics`), so the weights depend on the Python version as well as on the seeds below.

1. train a byte-level Llama target on the corpus and round it to bfloat16;
2. let the rounded target answer prompts greedily;
3. train an EAGLE-3 draft on those answers with speculators' own model and loss, and round it too;
4. write `target/` (Hugging Face) and `draft/` (speculators); `eagle-trace export` makes SGLang's form of it.

Shape suffixes: B batch, T time, H hidden size, V target vocabulary.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_trace.demo import prompts_file
from eagle_trace.demo.corpus import BOS, EOS, PAD, corpus, write_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

SEED = 20
THREADS = 2
VOCAB = 320
LAYERS = 8
AUX_LAYERS = [2, LAYERS // 2, LAYERS - 3]
DRAFT_VOCAB = 80
TTT_STEPS = 3
ANSWER_TOKENS = 128
VERIFIER_NAME = "eagle-trace-demo-target"


class Answer(NamedTuple):
    """Token ids of a prompt and of the target's greedy answer to it."""

    ids: list[int]
    prompt_tokens: int


class Budget(NamedTuple):
    """How much to train; the defaults are what the shipped models were made with."""

    target_steps: int = 1000
    target_batch: int = 12
    target_window: int = 256
    answers: int = 1000
    draft_steps: int = 1100
    draft_batch: int = 3


# ---------------------------------------------------------------- target


def target_config() -> LlamaConfig:
    """A Llama of about 1.2M parameters with grouped-query attention."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def _windows(documents: Sequence[Sequence[str]], budget: Budget) -> Iterator[torch.Tensor]:
    """Batches [B, T + 1] that start where a paragraph starts, half of them behind a BOS; EOS ends a topic."""
    import torch

    stream: list[int] = []
    starts: list[int] = []
    for paragraphs in documents:
        for text in paragraphs:
            starts.append(len(stream))
            stream += (text + "\n").encode("ascii")
        stream.append(EOS)
    width = budget.target_window + 1
    stream += stream[:width]
    rng = random.Random(SEED)
    while True:
        rows = []
        for _ in range(budget.target_batch):
            # An offset of up to one paragraph, so that long paragraphs are read to their end.
            at = min(rng.choice(starts) + rng.choice((0, 0, rng.randrange(400))), len(stream) - width)
            row = stream[at : at + width]
            rows.append([BOS, *row[:-1]] if rng.random() < 0.5 else row)
        yield torch.tensor(rows)


def _optimizers(model: torch.nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    import torch

    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    inner = [p for n, p in named if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    outer = [p for n, p in named if not any(p is q for q in inner)]
    return [
        torch.optim.Muon(inner, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def _step(optimizers: list[torch.optim.Optimizer], loss: torch.Tensor, learning_rate: float) -> None:
    import torch

    loss.backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()


def _schedule(peak: float, step: int, steps: int) -> float:
    warm_up = min(1.0, (step + 1) / 30)
    return peak * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train_target(model: PreTrainedModel, documents: Sequence[Sequence[str]], budget: Budget) -> PreTrainedModel:
    """Train a fresh model on all of the corpus, then round its weights to bfloat16 (returned as float32)."""
    import torch

    peak = 4e-3
    optimizers = _optimizers(model, peak)
    batches = _windows(documents, budget)
    for step in range(budget.target_steps):
        ids_BT = next(batches)
        logits_BTV = model(ids_BT[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
        _step(optimizers, loss, _schedule(peak, step, budget.target_steps))
        if step % 50 == 0 or step == budget.target_steps - 1:
            log(f"target step {step}: {loss.item():.3f} nats/byte")
    return model.to(torch.bfloat16).float().eval()


# ---------------------------------------------------------------- answers


def answer_prompts(model: PreTrainedModel, documents: Sequence[Sequence[str]], count: int) -> list[Answer]:
    """Greedy answers to the starts of random sentences; one prompt length a batch, so nothing is padded."""
    import torch

    rng = random.Random(SEED)
    held_out = {json.loads(line)["prompt"][:16] for line in prompts_file().read_text("utf-8").splitlines()}
    text = " ".join(p for paragraphs in documents for p in paragraphs)
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", text)
    answers: list[Answer] = []
    for length in (16, 24, 36, 54, 80):
        fitting = sorted({s[:length] for s in sentences if len(s) >= length and s[:16] not in held_out})
        rng.shuffle(fitting)
        starts = [list(s.encode("ascii")) for s in fitting[: count // 5]]
        rows = [[BOS, *ids[:-1]] if i % 2 else ids for i, ids in enumerate(starts)]
        for at in range(0, len(rows), 64):
            prompts = torch.tensor(rows[at : at + 64])
            with torch.no_grad():
                mask = torch.ones_like(prompts)
                out = model.generate(prompts, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            answers += [Answer(_until_eos(ids, length), length) for ids in out.tolist()]
    return answers


def _until_eos(ids: list[int], prompt_tokens: int) -> list[int]:
    return ids[: ids.index(EOS, prompt_tokens) + 1] if EOS in ids[prompt_tokens:] else ids


# ---------------------------------------------------------------- draft


class Features(NamedTuple):
    """Token ids [T], aux features [T, 3H], last hidden states [T, H] and which tokens are answer [T]."""

    ids: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    mask: torch.Tensor


def target_features(model: PreTrainedModel, answers: Sequence[Answer], layers: Sequence[int]) -> list[Features]:
    """The target's own hidden states on its answers; the last ones are taken in front of its final norm."""
    import torch

    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    features = []
    with torch.no_grad():
        for answer in answers:
            ids = torch.tensor(answer.ids)
            hidden = model(ids[None], output_hidden_states=True).hidden_states
            aux = torch.cat([hidden[i][0] for i in layers], dim=-1)
            mask = torch.arange(len(ids)) >= answer.prompt_tokens
            features.append(Features(ids, aux, before_norm.pop()[0], mask))
    hook.remove()
    return features


def draft_vocabulary(answers: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids the target uses most, as d2t (offsets, int64 [draft vocabulary]) and t2d (bool [V])."""
    import torch

    counts = collections.Counter(i for a in answers for i in a.ids[a.prompt_tokens :])
    order = sorted(range(VOCAB), key=lambda i: (-counts[i], i not in range(0x20, 0x7F), i))
    kept = torch.tensor(sorted(order[:DRAFT_VOCAB]))
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(DRAFT_VOCAB), t2d


def _packed(features: Sequence[Features]) -> dict[str, torch.Tensor]:
    """Several answers along T, each shifted by one as `speculators.models.eagle3.data` does."""
    import torch

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)[None]

    lengths = [len(f.ids) - 1 for f in features]
    return {
        "input_ids": join([f.ids[1:] for f in features]),
        "hidden_states": join([f.aux[:-1] for f in features]),
        "verifier_last_hidden_states": join([f.last[1:] for f in features]),
        "loss_mask": join([f.mask[1:] for f in features]),
        "document_ids": join([torch.full((n,), i) for i, n in enumerate(lengths)]),
        "position_ids": join([torch.arange(1, n + 1) for n in lengths]),
    }


def draft_config(target: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder config of a draft for a Llama target."""
    config = copy.deepcopy(target)
    config.update({"num_hidden_layers": 1, "tie_word_embeddings": False})
    return config


def train_draft(
    target_folder: Path,
    config: PreTrainedConfig,
    layers: Sequence[int],
    answers: Sequence[Answer],
    features: Sequence[Features],
    budget: Budget,
) -> Any:
    """Train speculators' Eagle3DraftModel with its own loss; returns it rounded to bfloat16."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel

    torch.manual_seed(SEED)
    d2t, t2d = draft_vocabulary(answers)
    draft = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=False,
        norm_output=False,
        embed_requires_grad=False,
        ttt_steps=TTT_STEPS,
        target_layer_ids=list(layers),
        verifier_name_or_path=str(target_folder),
        draft_attn_impl="eager",
    ).float()
    draft.lm_head.weight.requires_grad_(True)
    loss_config = resolve_loss_config("kl_div", "eager")  # the fused ones need Triton
    peak = 3e-3
    optimizers = _optimizers(draft, peak)
    rng = random.Random(SEED)
    for step in range(budget.draft_steps):
        batch = _packed(rng.sample(features, budget.draft_batch))
        _, loss, metrics = draft(**batch, ttt_steps=TTT_STEPS, loss_config=loss_config)
        _step(optimizers, loss, _schedule(peak, step, budget.draft_steps))
        if step % 50 == 0 or step == budget.draft_steps - 1:
            log(f"draft step {step}: loss {loss.item():.3f}, accuracy {_accuracy(metrics)}")
    return draft.to(torch.bfloat16)


def _accuracy(metrics: dict[str, torch.Tensor]) -> str:
    """Share of tokens right at each step, given that the steps before it were right."""
    ratios = [metrics[f"cond_acc_{s}_sum"] / metrics[f"cond_acc_{s}_total"] for s in range(TTT_STEPS)]
    return " ".join(f"{float(r):.3f}" for r in ratios)


# ---------------------------------------------------------------- files


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_target(model: PreTrainedModel, folder: Path) -> None:
    """Config, bfloat16 weights, generation config and tokenizer."""
    import torch

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    write_tokenizer(folder)


def save_draft(draft: Any, folder: Path, verifier: str = VERIFIER_NAME) -> None:
    """The draft as speculators saves it, without the code it puts beside it."""
    draft.config.speculators_config.verifier.name_or_path = verifier
    draft.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    # Speculators adds a copy of its own config.py and an `auto_map` to it: no code in a model folder.
    (folder / "config.py").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.pop("auto_map", None)
    _write_json(folder / "config.json", config)


def prepare() -> None:
    """Make training give the same weights each time: threads, seeds, deterministic algorithms."""
    # Read when torch is first imported: spinning threads make a shared machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)


def build(out: Path, budget: Budget) -> None:
    """Train both models and write both folders under `out`."""
    prepare()
    from transformers import LlamaForCausalLM

    documents = corpus()
    log(f"{sum(len(p) for d in documents for p in d)} bytes of text")
    target = train_target(LlamaForCausalLM(target_config()), documents, budget)
    save_target(target, out / "target")
    answers = answer_prompts(target, documents, budget.answers)
    log(f"{len(answers)} answers, {sum(len(a.ids) - a.prompt_tokens for a in answers)} tokens")
    features = target_features(target, answers, AUX_LAYERS)
    save_draft(
        train_draft(out / "target", draft_config(target.config), AUX_LAYERS, answers, features, budget), out / "draft"
    )
    log(f"wrote {out}")


_SUMMARY = "Rebuild the demo models."
_STARTED = time.perf_counter()


def log(line: str) -> None:
    """Print a line behind the seconds since the start."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: `python -m eagle_trace.demo.build OUT [--quick]`."""
    parser = argparse.ArgumentParser(prog="python -m eagle_trace.demo.build", description=_SUMMARY)
    parser.add_argument("out", type=Path, help="folder to write target/ and draft/ into")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    args = parser.parse_args(argv)
    build(args.out, Budget(target_steps=20, answers=20, draft_steps=5) if args.quick else Budget())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
