"""The prompts' tokens, which must be the same on both sides."""

from __future__ import annotations

from eagle_trace_analysis.causes.base import Cause, Outcome, confirmed, not_tested, ruled_out
from eagle_trace_analysis.comparison.checks import prompt_tokens
from eagle_trace_analysis.evidence.context import Context
from eagle_trace_analysis.pairing.templates import Vocabulary, where_templates_part


def check(context: Context) -> Outcome:
    """Whether both sides saw the same tokens of each prompt."""
    shared = set(context.train.prompts["prompt_key"]) & set(context.serve.prompts["prompt_key"])
    if not shared:
        return not_tested("no prompt in common", "record both sides on the same prompts (--replay)")
    found = context.unequal_prompts
    if not found:
        total = int(context.train.prompts["num_prompt_tokens"].sum())
        return ruled_out(f"{total:,} prompt tokens of {len(shared)} prompts are equal")
    evidence = f"{len(found)} of {len(shared)} prompts differ; {found[0].why}"
    tokens = [prompt_tokens(trace)[found[0].prompt_key][1] for trace in (context.train, context.serve)]
    words = where_templates_part(tokens[0].tolist(), tokens[1].tolist(), Vocabulary.of(context.target_path))
    evidence += f": {words}" if words else ""
    return confirmed(evidence, "use one chat template, one BOS rule and one truncation on both sides", "token")


CAUSE = Cause(
    "tokens-differ",
    "Low accept length.",
    "Token ids of every prompt on both sides, one by one.",
    "Use one chat template, one BOS rule, one truncation.",
    ("token",),
    check,
)
