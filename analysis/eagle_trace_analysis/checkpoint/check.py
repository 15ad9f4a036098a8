"""`eagle-trace check`: everything that can be said of a draft without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from eagle_trace_analysis.checkpoint.compare import UNREAD, compare, summarise
from eagle_trace_analysis.checkpoint.config_checks import check_config, check_decoder, check_format
from eagle_trace_analysis.checkpoint.d2t import check_d2t
from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding, Status, TensorChange, skipped
from eagle_trace_analysis.checkpoint.layers import check_layer_ids
from eagle_trace_analysis.checkpoint.names import check_missing, check_names, check_shapes
from eagle_trace_analysis.checkpoint.positions import check_max_position, check_rope_tables, check_window
from eagle_trace_analysis.checkpoint.quantised import check_quantisation
from eagle_trace_analysis.checkpoint.recipe import Recipe
from eagle_trace_analysis.checkpoint.remote import fetched, folder_of
from eagle_trace_analysis.checkpoint.scan import Scan, can_scan, scan
from eagle_trace_analysis.checkpoint.settings import (
    check_dtype,
    check_eps,
    check_fc_norm,
    check_norm_output,
    check_residual_norm,
    check_rope,
    check_tied,
    check_vocabulary,
)
from eagle_trace_analysis.checkpoint.subject import Subject, open_subject
from eagle_trace_analysis.checkpoint.targets import check_target
from eagle_trace_analysis.checkpoint.weights import (
    check_embedding,
    check_head_rows,
    check_initial,
    check_values,
    check_zeros,
)
from eagle_trace_analysis.checkpoint.width import check_aux, check_fc
from eagle_trace_analysis.engines import SGLANG, Engine

#: checks that read configs, names, shapes and single rows, in the order of the report
CHECKS = (
    check_format,
    check_config,
    check_target,
    check_names,
    check_missing,
    check_quantisation,
    check_shapes,
    check_aux,
    check_fc,
    check_layer_ids,
    check_residual_norm,
    check_fc_norm,
    check_norm_output,
    check_decoder,
    check_rope,
    check_eps,
    check_max_position,
    check_window,
    check_tied,
    check_vocabulary,
    check_embedding,
    check_d2t,
    check_head_rows,
)


#: checks that only names and configs are needed for, where an index is all there is
BY_NAME = (
    check_format,
    check_config,
    check_target,
    check_names,
    check_missing,
    check_aux,
    check_layer_ids,
    check_residual_norm,
    check_fc_norm,
    check_norm_output,
    check_rope,
    check_eps,
    check_max_position,
    check_window,
)
#: of a tensor that lies elsewhere, the most that is fetched to look at its values
FETCHED_WHOLE = 1 << 18


def check(
    draft: Path | str,
    *,
    target: Path | str | None = None,
    reference: Path | str | None = None,
    engine: Engine = SGLANG,
    trainer: str | None = None,
    recipe: Recipe | None = None,
) -> CheckResult:
    """Check a draft checkpoint, in speculators or SGLang format, against what the engine loads and computes.

    Args:
        draft: the checkpoint's folder, or the URL of one (``hf://owner/name``).
        target: the target's folder; a config is enough for most checks, weights let embedding and head be
            compared.
        reference: another checkpoint of the draft, or the config it was trained with. In a trainer's format it also
            tells how the draft was trained.
        engine: what is to serve it.
        trainer: who trained it (``specforge==0.2.0``); None to have it told by the folder.
        recipe: what the training was run with.

    Raises:
        CheckpointError: a folder cannot be read, or holds no draft of a kind known here.
        UsageError: no trainer is called so, or a URL cannot be read with what is installed.
    """
    own = folder_of(draft)
    its_target, other = folder_of(target) if target else None, folder_of(reference) if reference else None
    subject = open_subject(own, its_target, other, engine, trainer=trainer, recipe=recipe)
    findings, changes = _findings(subject)
    return CheckResult(
        str(draft),
        subject.format,
        findings,
        str(target) if target else None,
        str(reference) if reference else None,
        changes,
        subject.origin.words if subject.origin is not None and subject.kind is None else "",
        fetched(own, its_target, other),
        engine=engine.ENGINE,
    )


def _findings(subject: Subject) -> tuple[list[Finding], list[TensorChange]]:
    changes: list[TensorChange] = []
    if not subject.has_sizes and subject.kind is None:
        without = skipped("everything else", "", "the shapes of a draft follow from the sizes above: set those first")
        return [check_format(subject), check_config(subject), check_target(subject), without], changes
    findings = [one(subject) for one in checks_of(subject)]
    if subject.checkpoint.index_only:
        why = "the weights are not there, only their index: what needs a shape or a value was not looked at"
        return [*findings, skipped("everything else", "", why)], changes
    scans = scan_floats(subject)
    # of another kind of draft it is known only whether its values are finite
    findings += [check_values(subject, scans)] if subject.kind is not None else _on_values(subject, scans)
    if subject.reference is not None:
        changes = compare(subject.checkpoint, subject.reference, most_fetched=FETCHED_WHOLE)
        unread = [one for one in changes if one.change == UNREAD]
        changes = [one for one in changes if one.change != UNREAD]
        findings.append(summarise(changes, len(subject.tensors), len(unread)))
    return findings, changes


def checks_of(subject: Subject) -> tuple[Callable[[Subject], Finding], ...]:
    """The checks that apply: for any other kind of draft only the one that says so."""
    if subject.kind is not None:
        return (check_format,)
    by_recipe = (check_rope_tables,) if subject.recipe is not None else ()
    return (BY_NAME if subject.checkpoint.index_only else CHECKS) + by_recipe


def scan_floats(subject: Subject) -> dict[str, Scan]:
    """One pass over every tensor of numbers with a fraction, by speculators' names; of remote ones, the small."""
    return {
        name: scan(tensor)
        for name, tensor in subject.tensors.items()
        if can_scan(tensor) and not (tensor.remote and tensor.nbytes > FETCHED_WHOLE)
    }


def _on_values(subject: Subject, scans: Mapping[str, Scan]) -> Iterator[Finding]:
    yield check_dtype(subject, scans)
    left = [tensor for name, tensor in subject.tensors.items() if name not in scans and can_scan(tensor)]
    found = [check_values(subject, scans), check_zeros(scans)]
    if not left:
        yield from (*found, check_initial(subject, scans))
        return
    size = sum(tensor.nbytes for tensor in left)
    why = (
        f"not checked: {len(left)} tensors of {size / 1e6:,.0f} MB were not fetched (download the folder to have them "
        "read)"
    )
    for one in found:
        yield (
            one
            if one.status is Status.FAIL
            else skipped(one.name, one.cause, f"{why}; of those that were, {one.evidence}")
        )
    yield skipped("trained", "weights-missing", why)
