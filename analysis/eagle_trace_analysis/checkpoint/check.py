"""`eagle-trace check`: everything that can be said of a draft without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from eagle_trace_analysis.checkpoint.compare import compare, summarise
from eagle_trace_analysis.checkpoint.config_checks import check_config, check_decoder, check_format
from eagle_trace_analysis.checkpoint.d2t import check_d2t
from eagle_trace_analysis.checkpoint.finding import CheckResult, Finding, TensorChange, skipped
from eagle_trace_analysis.checkpoint.layers import check_layer_ids
from eagle_trace_analysis.checkpoint.names import check_missing, check_names, check_shapes
from eagle_trace_analysis.checkpoint.quantised import check_quantisation
from eagle_trace_analysis.checkpoint.scan import Scan, can_scan, scan
from eagle_trace_analysis.checkpoint.settings import (
    check_dtype,
    check_eps,
    check_fc_norm,
    check_max_position,
    check_norm_output,
    check_residual_norm,
    check_rope,
    check_tied,
    check_vocabulary,
    check_window,
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


def check(
    draft: Path, *, target: Path | None = None, reference: Path | None = None, engine: Engine = SGLANG
) -> CheckResult:
    """Check a draft checkpoint, in speculators or SGLang format, against what the engine loads and computes.

    Args:
        draft: the checkpoint's folder.
        target: the target's folder; a config is enough for most checks, weights let embedding and head be
            compared.
        reference: another checkpoint of the draft. In speculators format it also tells how the draft was
            trained.
        engine: what is to serve it.

    Raises:
        CheckpointError: a folder cannot be read, or holds no draft of a kind known here.
    """
    subject = open_subject(draft, target, reference, engine)
    if not subject.has_sizes and subject.kind is None:
        findings = [check_format(subject), check_config(subject), check_target(subject)]
        without = skipped("everything else", "", "the shapes of a draft follow from the sizes above: set those first")
        return CheckResult(
            str(draft),
            subject.format,
            [*findings, without],
            str(target) if target else None,
            str(reference) if reference else None,
            engine=engine.ENGINE,
        )
    scans = scan_floats(subject)
    findings = [one(subject) for one in checks_of(subject)]
    # of another kind of draft it is known only whether its values are finite
    findings += [check_values(subject, scans)] if subject.kind is not None else _on_values(subject, scans)
    changes: list[TensorChange] = []
    if subject.reference is not None:
        changes = compare(subject.checkpoint, subject.reference)
        findings.append(summarise(changes, len(subject.tensors)))
    return CheckResult(
        str(draft),
        subject.format,
        findings,
        str(target) if target else None,
        str(reference) if reference else None,
        changes,
        engine=engine.ENGINE,
    )


def checks_of(subject: Subject) -> tuple[Callable[[Subject], Finding], ...]:
    """The checks that apply: for any other kind of draft only the one that says so."""
    return CHECKS if subject.kind is None else (check_format,)


def scan_floats(subject: Subject) -> dict[str, Scan]:
    """One pass over every tensor of numbers with a fraction, by speculators' names."""
    return {name: scan(tensor) for name, tensor in subject.tensors.items() if can_scan(tensor)}


def _on_values(subject: Subject, scans: Mapping[str, Scan]) -> Iterator[Finding]:
    yield check_dtype(subject, scans)
    yield check_values(subject, scans)
    yield check_zeros(scans)
    yield check_initial(subject, scans)
