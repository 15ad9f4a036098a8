"""docs/causes.md, written from the registry: ``python -m eagle_trace_analysis.causes.document docs/causes.md``."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from eagle_trace_analysis.causes import REGISTRY, Cause

HEAD = """# Causes

Written by `python -m eagle_trace_analysis.causes.document docs/causes.md`; do not edit.

`eagle-trace diff` looks at every cause below and gives each one of three verdicts:

- **confirmed**: decisive evidence. Either a fact about what was loaded together with a difference at the site it
  predicts, or a *counterfactual*: one step recomputed from the server's own recorded inputs does not give what the
  server recorded if it is computed as trained, and does (up to rounding) if the cause is assumed.
- **ruled out**: looked at and innocent, with the numbers. Leave it alone.
- **not tested**: something was lacking; the report says what would test it.

Recomputing needs traces with values, the trained checkpoint, and the config in the train trace. The folders are those
of the manifests, or of `--train-draft`, `--serve-draft` and `--target`.

**One fault, one cause.** Where several counterfactuals reproduce the same steps, one is confirmed: the one that
explains more steps, or is what the deployed folder says. The others are *not tested*, "equally good here". Two faults
that meet in one step are both confirmed where the deployed folder says both and neither explains the step alone.

**Two servers, two trainers** (docs/two-traces.md): the reference stands for the training, with the config and
the weights of its own folder, and "the server" is the other trace. Causes that are about the training itself are *not
tested*: "no training trace"; between two trainers, those about what only a server does.

What no confirmed cause brings down to rounding is listed as *not explained*, so that an unknown cause is not taken for
a known one; so is a step that a confirmed cause makes better and not right. Two traces cannot show what both sides do
wrong alike.
"""


def render() -> str:
    """The document."""
    return "\n".join([HEAD, *(_section(cause) for cause in REGISTRY.values())])


def _section(cause: Cause) -> str:
    where = ", ".join(f"`{site}`" for site in cause.sites) or "anywhere, or nowhere"
    lines = [f"## {cause.name}", "", f"First seen at: {where}.", ""]
    for title, text in (("Looks like", cause.looks), ("Proved by", cause.proof), ("Fixed by", cause.cure)):
        lines += textwrap.wrap(f"- **{title}:** {text}", 118, subsequent_indent="  ")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
