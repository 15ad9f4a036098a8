"""A training loop of one's own on the tiny pair, as a user writes it: real batches, gradients, an optimizer."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer
from speculators.train.data import CollateFn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.support.tiny_speculators import HIDDEN, LAYER_IDS, Pair

#: speculators' loss without the fused kernel, which needs a GPU
LOSS = resolve_loss_config("kl_div", "eager")
#: how many rows a batch has, padding included
ROWS = 32


def trainable(pair: Pair, dtype: torch.dtype = torch.float32) -> Any:
    """The draft of a pair as training begins with it: eager attention, its verifier's norm and head beside it."""
    config = Eagle3SpeculatorConfig.from_pretrained(pair.draft)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(pair.target)
    return Eagle3DraftModel.from_pretrained(pair.draft, config=config, dtype=dtype).train()


def sample(pair: Pair, token_ids: Sequence[int], answer: int, layer_ids: Sequence[int] = LAYER_IDS) -> dict[str, Any]:
    """A training sample as speculators' dataset gives it: the target's features of a document, its answer's mask."""
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    ids = torch.tensor(list(token_ids))
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    # behind the last layer transformers gives the normed state, training takes it as it enters the norm
    features = [last[0] if layer == len(states) - 1 else states[layer] for layer in layer_ids]
    return {
        "hidden_states": torch.cat(features, dim=-1)[0],
        "input_ids": ids,
        "verifier_last_hidden_states": last[0][0],
        "loss_mask": torch.arange(len(ids)) >= answer,
        "lengths": torch.tensor([len(ids)]),
        "position_ids": torch.arange(len(ids)),
    }


def collate(samples: Sequence[dict[str, Any]], rows: int = ROWS) -> dict[str, Any]:
    """Samples as one packed batch, by speculators' own shift and packing."""
    hidden = samples[0]["verifier_last_hidden_states"].shape[-1] if samples else HIDDEN
    batch = CollateFn(rows, hidden, num_target_layers=len(LAYER_IDS), dtype=torch.float32, preprocess=shift_batch)(
        [dict(one) for one in samples]
    )
    batch.pop("error_records")
    return batch


@dataclass
class Trained:
    """Everything a training leaves behind that a recording might have changed."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    random: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.losses, *self.gradients, *self.parameters, *self.random]


class Loop:
    """The loop: one optimizer step a batch, with dropout-like noise so that the random state matters.

    Args:
        model: the draft, or a wrapper around it.
        steps: forwards of the draft a batch.
    """

    def __init__(self, model: Any, steps: int = 3) -> None:
        torch.manual_seed(7)
        self.model, self._steps = model, steps
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=1e-2)
        self.left = Trained()

    def step(self, batch: dict[str, Any]) -> None:
        noisy = batch["hidden_states"] + 1e-3 * torch.randn(batch["hidden_states"].shape)
        _, loss, _ = self.model(**batch | {"hidden_states": noisy}, ttt_steps=self._steps, loss_config=LOSS)
        self._optimizer.zero_grad()
        loss.backward()
        self.left.losses.append(loss.detach().clone())
        self.left.gradients += [p.grad.clone() for p in self._trained if p.grad is not None]
        self._optimizer.step()
        self.left.parameters += [p.detach().clone() for p in self.model.parameters()]
        self.left.random.append(torch.get_rng_state())


def write_training_data(folder: Path, samples: Sequence[dict[str, Any]]) -> Path:
    """Write samples as speculators' trainer reads them: an Arrow dataset and ``hidden_states/hs_N.safetensors``."""
    columns = {
        "input_ids": [one["input_ids"].tolist() for one in samples],
        "loss_mask": [one["loss_mask"].long().tolist() for one in samples],
        "seq_len": [len(one["input_ids"]) for one in samples],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for number, one in enumerate(samples):
        features = one["hidden_states"].reshape(len(one["input_ids"]), len(LAYER_IDS), -1)
        states = torch.cat([features, one["verifier_last_hidden_states"][:, None]], dim=1)
        tensors = {"hidden_states": states.contiguous(), "token_ids": one["input_ids"]}
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
    return folder


def trainer_command(pair: Pair, data: Path, out: Path, *options: str) -> list[str]:
    """speculators' own trainer on `data`, on whatever device is there; it goes on from the pair's draft."""
    start = out.with_name(f"{out.name}-start")
    shutil.copytree(pair.draft, start)
    config = json.loads((start / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(pair.target)
    (start / "config.json").write_text(json.dumps(config))
    return [
        sys.executable, str(Path(__file__).with_name("cpu_speculators.py")), "train",
        "--verifier-name-or-path", str(pair.target), "--from-pretrained", str(start), "--data-path", str(data),
        "--speculator-type", "eagle3", "--draft-attn-impl", "eager", "--loss-implementation", "eager",
        "--hidden-states-dtype", "float32", "--total-seq-len", str(ROWS), "--optimizer", "adamw", "--epochs", "1",
        "--save-path", str(out), "--on-missing", "raise", "--train-data-ratio", "0.8", *options,
    ]  # fmt: skip


@contextmanager
def without_accelerator() -> Iterator[None]:
    """Lets speculators' trainer run in this process on a CPU; it asks for device 0, and waits for it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        patch.setattr(trainer, "get_local_rank", lambda: torch.device("cpu"))
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        yield


def trainer_of(model: Any, samples: Sequence[dict[str, Any]], out: Path, steps: int) -> Any:
    """speculators' own trainer of a model on samples, two to a batch; within `without_accelerator`."""
    hidden = samples[0]["verifier_last_hidden_states"].shape[-1]
    pack = CollateFn(128, hidden, num_target_layers=len(LAYER_IDS), dtype=torch.float32, preprocess=shift_batch)
    config = trainer.TrainerConfig(
        lr=1e-3,
        num_epochs=-(-2 * steps // len(samples)),
        max_steps=steps,
        save_path=str(out),
        checkpoint_freq=1000,
        hidden_states_dtype=torch.float32,
        train_call_kwargs={"ttt_steps": 3, "loss_config": LOSS},
    )
    return trainer.Trainer(model, config, DataLoader(list(samples), batch_size=2, collate_fn=pack))
