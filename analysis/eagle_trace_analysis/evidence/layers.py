"""Target layers in words, and how many there are."""

from __future__ import annotations

from eagle_trace_analysis.evidence.context import Context


def target_layers(context: Context) -> int | None:
    for facts in (context.train.manifest.target, context.serve.manifest.target):
        config = facts.get("config", {})
        text = config.get("text_config", config)
        layers = facts.get("num_hidden_layers") or text.get("num_hidden_layers")
        if layers:
            return int(layers)
    return context.target.layers if context.target else None


def layer_words(number: int, layers: int | None) -> str:
    """A target layer in words: Hugging Face `hidden_states[i]`, L + 1 for after the final norm."""
    if number == 0:
        return "the embedding's output (0)"
    if layers is not None and number == layers + 1:
        return "the last layer's output after the final norm"
    if layers is not None and number == layers:
        return f"the last layer's output ({number})"
    return f"the input of layer {number}"
