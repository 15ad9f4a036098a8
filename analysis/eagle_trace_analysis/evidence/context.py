"""What a cause may look at: the diff, both traces, the checkpoints, and the replay, each worked out when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_trace.capture import LEVELS
from eagle_trace.errors import CheckpointError, TraceError
from eagle_trace.reader import Trace
from eagle_trace_analysis.checkpoint.check import checks_of
from eagle_trace_analysis.checkpoint.files import Checkpoint, StoredTensor, open_checkpoint
from eagle_trace_analysis.checkpoint.finding import Finding, Status
from eagle_trace_analysis.checkpoint.subject import Subject, Target, open_subject, open_target
from eagle_trace_analysis.comparison.checks import PromptMismatch, check_prompts
from eagle_trace_analysis.comparison.result import Diff, Divergence, SiteResult
from eagle_trace_analysis.comparison.rowwise import RowFigures
from eagle_trace_analysis.engines import Engine, engine_of_host
from eagle_trace_analysis.evidence.company import Company, company_of
from eagle_trace_analysis.evidence.features import Features
from eagle_trace_analysis.pairing.roles import in_order
from eagle_trace_analysis.replay.cached import over_its_cache
from eagle_trace_analysis.replay.form import Form, form_of
from eagle_trace_analysis.replay.recorded import Recorded, choose
from eagle_trace_analysis.replay.replay import Replay, Replayed, judge
from eagle_trace_analysis.replay.weights import Weights, weights_of
from eagle_trace_analysis.tensors.loaded import Apart, apart

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Checkpoints:
    """Folders of the checkpoints; None for those of the manifests."""

    train_draft: Path | None = None
    serve_draft: Path | None = None
    target: Path | None = None


class Context:
    """Everything known about a pair of traces.

    Attributes:
        diff: the comparison.
        train, serve: the traces.
    """

    def __init__(self, diff: Diff, train: Trace, serve: Trace, checkpoints: Checkpoints | None = None) -> None:
        train, serve = in_order(train, serve)
        self.diff, self.train, self.serve = diff, train, serve
        given = checkpoints or Checkpoints()
        self.train_path = given.train_draft or _path(train.manifest.draft)
        self.serve_path = given.serve_draft or _path(serve.manifest.draft)
        self.target_path = given.target or _path(serve.manifest.target) or _path(train.manifest.target)
        self.train_target_path = given.target or _path(train.manifest.target)
        #: whether the reference is a training, and the other a server, in whose terms the causes are told
        self.has_training, self.has_server = train.side == "train", serve.side == "serve"
        self.problems: dict[str, str] = {}
        self._results: dict[str, list[SiteResult]] = {}
        self.take(diff)
        self._judged: dict[tuple[str, int], Replayed] = {}
        self._companies: dict[tuple[str, ...], Company | None] = {}
        #: what the causes said so far, by name (`Cause.last` looks when all others have)
        self.outcomes: dict[str, Any] = {}

    # ---- the comparison ------------------------------------------------------------------------------------

    def take(self, diff: Diff) -> None:
        """Go on with another reading of the same comparison."""
        self.diff = diff
        self._results = {}
        for result in diff.sites:
            self._results.setdefault(result.site, []).append(result)

    def results(self, site: str) -> list[SiteResult]:
        """A site's results, step by step; [] if it is on neither side."""
        return self._results.get(site, [])

    def divergence(self, site: str) -> Divergence | None:
        """The first step's divergence of a site."""
        return next((one.divergence for one in self.results(site) if one.divergence), None)

    def agrees(self, site: str, step: int | None = None) -> bool:
        """Whether the two sides agree at a site (at every step that was compared, or at one)."""
        found = [one.verdict for one in self.results(site) if step in (None, one.step)]
        return "diverged" not in found and "agree" in found

    @property
    def feature_sites(self) -> list[str]:
        """``target.hidden.k`` of the training side."""
        return [site for site in self.train.sites if site.startswith("target.hidden.")]

    @property
    def skips_fc(self) -> bool:
        """Whether the server left fc out, being fed another width than the training was."""
        fused = self.divergence("fused")
        return fused is not None and fused.kind == "shape" and "fc.out" not in self.serve.sites

    @property
    def other_algorithm(self) -> str | None:
        """The server's speculative algorithm if it is not EAGLE3; it then feeds one layer and ignores head and d2t."""
        algorithm = str(self.serve.manifest.settings.get("algorithm") or "EAGLE3").rsplit(".", 1)[-1].upper()
        return None if algorithm == "EAGLE3" else algorithm

    # ---- configs and checkpoints ---------------------------------------------------------------------------

    @cached_property
    def engine(self) -> Engine:
        """The engine whose tables the deployed draft is held against: that of the other side, if it is known here."""
        engine = engine_of_host(self.serve.manifest.host)
        return engine.other_class(self.serve.manifest.draft.get("config") or {}) or engine

    @cached_property
    def trained(self) -> Mapping[str, Any]:
        """The draft's config as trained."""
        config = self.train.manifest.draft.get("config")
        return config if isinstance(config, Mapping) else {}

    @cached_property
    def served(self) -> Mapping[str, Any]:
        """The draft's config as served."""
        config = self.serve.manifest.draft.get("config")
        return config if isinstance(config, Mapping) else {}

    @cached_property
    def form(self) -> Form | None:
        """The forward as trained, None if the train trace does not say it."""
        return self._form(self.trained)

    @cached_property
    def served_form(self) -> Form | None:
        """The forward as the deployed config has it."""
        return self._form(self.served)

    @cached_property
    def trained_ids(self) -> list[int] | None:
        """Target layers of the training, by their inputs."""
        ids = self.train.manifest.draft.get("layer_ids")
        if not ids and not self.has_training and self.trained:
            target = self.train_target
            layers, architecture = (target.layers, target.architecture) if target else (None, None)
            ids = self.engine.captured_inputs(self.trained, layers, architecture)
        elif not ids and self.form is not None:
            ids = self.form.layer_ids
        return [int(i) for i in ids] if ids else None

    def _form(self, config: Mapping[str, Any]) -> Form | None:
        if not config:
            return None
        try:
            return form_of(config, self.engine)
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None

    @cached_property
    def train_draft(self) -> Checkpoint | None:
        """The trained checkpoint."""
        return self._open("trained draft", self.train_path)

    @cached_property
    def serve_draft(self) -> Checkpoint | None:
        """The deployed checkpoint."""
        return self._open("deployed draft", self.serve_path)

    @cached_property
    def target(self) -> Target | None:
        """The server's target."""
        return self._open_target(self.target_path)

    @cached_property
    def train_target(self) -> Target | None:
        """The target of the training side."""
        return self._open_target(self.train_target_path)

    def _open_target(self, path: Path | None) -> Target | None:
        try:
            return open_target(path, self.engine) if path is not None and path.is_dir() else None
        except CheckpointError:
            return None

    def _open(self, what: str, path: Path | None) -> Checkpoint | None:
        if path is None:
            self.problems[what] = f"the manifest names no path of the {what}"
            return None
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            self.problems[what] = f"the {what} cannot be read: {error}"
            return None

    @cached_property
    def train_weights(self) -> Weights | None:
        """The trained weights, in the dtype that was served."""
        if self.train_draft is None:
            return None
        target = self.train_target
        embedding = target.embedding if target is not None else None
        weights = weights_of(self.train_draft, self.serve.manifest.dtype, embedding, self.engine)
        if not self.has_training and embedding is not None:
            # a server shares its target's embedding with the draft, whatever the draft ships
            weights = weights.borrowing("embed_tokens.weight", embedding)
        return weights

    # ---- static findings -----------------------------------------------------------------------------------

    @cached_property
    def subject(self) -> Subject | None:
        """The deployed draft beside the trained one, for the static checks."""
        if self.serve_draft is None or self.serve_path is None or not self.has_server:
            return None
        reference = self.train_path if self.train_draft is not None else None
        try:
            return open_subject(self.serve_path, self.target_path if self.target else None, reference, self.engine)
        except CheckpointError as error:
            self.problems["static checks"] = str(error)
            return None

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """Static findings by the check's name."""
        if self.subject is None:
            return {}
        found = {}
        for check in checks_of(self.subject):
            try:
                finding = check(self.subject)
            except CheckpointError as error:
                self.problems[check.__name__] = str(error)
                continue
            found[finding.name] = finding
        return found

    def failed(self, name: str) -> Finding | None:
        """The static finding of a check, if it failed or warned."""
        found = self.findings.get(name)
        return found if found is not None and found.status in (Status.FAIL, Status.WARN) else None

    def fix(self, name: str, otherwise: str) -> str:
        """The fix a static check gives, or another."""
        found = self.failed(name)
        return found.fix if found is not None and found.fix else otherwise

    def confirms(self, cause: str) -> bool:
        """Whether a cause that looked before this one is confirmed."""
        found = self.outcomes.get(cause)
        return found is not None and found.verdict == "confirmed"

    # ---- replay --------------------------------------------------------------------------------------------

    @cached_property
    def replay(self) -> Replay | None:
        """The serve side under the trained form and weights."""
        return self._replay(self.serve, [one.row.serve_prompt_id for one in self._rows()])

    @cached_property
    def control(self) -> Replay | None:
        """The training side under the same."""
        if self.replay is None:
            return None
        return self._replay(self.train, [one.row.prompt_id for one in self._rows()])

    @property
    def no_replay(self) -> str:
        """Why there is no replay."""
        if self.form is None and not self.has_training:
            return "the reference holds no config of the draft to recompute it by"
        if self.form is None:
            return "the train trace holds no config of the draft to recompute it by"
        if self.train_draft is None:
            return self.problems.get("trained draft", "there is no trained checkpoint")
        return self.problems.get("replay", f"recorded at level {self.level}: there are no values to recompute from")

    @property
    def level(self) -> str:
        """The lower level of the two traces."""
        return min(self.train.level, self.serve.level, key=LEVELS.index)

    @property
    def no_features(self) -> str:
        """Why there are no `features`."""
        if self.level != "values":
            return f"recorded at level {self.level}: no values of the target features on both sides"
        return "no values of the target features on both sides"

    def _rows(self) -> Iterable[Any]:
        return [one for one in self.diff.frontier if one.row is not None]

    def _replay(self, trace: Trace, prompts: list[int]) -> Replay | None:
        if self.form is None or self.train_weights is None or trace.level != "values":
            return None
        try:
            keys = choose(trace, prompts)
            if not len(keys):
                return None
            weights = self.train_weights
            if trace.manifest.dtype != weights.dtype:
                weights = Weights(weights.tensors, trace.manifest.dtype)
            return over_its_cache(Replay(Recorded(trace, keys), self.form, weights))
        except (CheckpointError, TraceError, ValueError) as error:
            self.problems["replay"] = str(error)
            return None

    def judged(self, site: str, step: int) -> Replayed:
        """Verdict of the isolated replay on one step of the serve side."""
        if (site, step) not in self._judged:
            if self.replay is None:
                return Replayed(site, step, "not replayed", reason=self.no_replay)
            if site not in self.replay.sites:
                return Replayed(site, step, "not replayed", reason=f"the server has no {site}")
            self._judged[site, step] = judge(self.replay, self.control, site, step)
        return self._judged[site, step]

    def nodes(self, sites: Iterable[str]) -> list[Replayed]:
        """Verdicts on some sites at every step they have."""
        if self.replay is None:
            return []
        known = self.replay.sites
        return [
            self.judged(site, step)
            for site in sites
            for step in self.replay.recorded.steps
            if site not in known or step == 0 or known[site].steps == "all"
        ]

    def says(self, name: str, value: Any) -> bool:
        """Whether the deployed config says so of a field of the form."""
        return self.served_form is not None and getattr(self.served_form, name) == value

    def company(self, *own: str) -> Company | None:
        """What the deployed folder says otherwise than the training, but for `own`; None if nothing.

        Args:
            own: fields of the form by name, ``rope frequencies``, ``rope layout``, ``weights``.
        """
        if own not in self._companies:
            self._companies[own] = company_of(self.replay, self.served_form, self.apart, own) if self.replay else None
        return self._companies[own]

    def layer_sites(self, *endings: str) -> list[str]:
        """Sites of all decoder layers with these endings (``attn.q``), in forward order."""
        names = self.replay.sites if self.replay else {}
        return [name for name in names if name.startswith("layer.") and name.split(".", 2)[2] in endings]

    # ---- tokens and features ---------------------------------------------------------------------------------

    @cached_property
    def unequal_prompts(self) -> list[PromptMismatch]:
        """Prompts that both sides name alike and that consist of different tokens."""
        return check_prompts(RowFigures.of(self.diff, self.train, self.serve).alignment)

    @cached_property
    def features(self) -> Features | None:
        """Target features of both sides on the same rows; None if a side keeps no values of them."""
        return Features.read(self.train, self.serve, self.diff)

    # ---- parameters ----------------------------------------------------------------------------------------

    @cached_property
    def params(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters as loaded, by speculators' names: training and serving."""
        sides = []
        for trace in (self.train, self.serve):
            table = trace.table("params")
            sides.append({row["canonical_name"]: row for row in table.to_pylist()})
        return sides[0], sides[1]

    @cached_property
    def apart(self) -> list[Apart]:
        """Parameters that both hosts hold with other numbers, d2t and t2d aside."""
        trained, served = self.params
        was, held = (_by_name(draft, self.engine) for draft in (self.train_draft, self.serve_draft))
        return [one for one in apart(trained, served, was, held) if one.name not in ("d2t", "t2d")]


def _by_name(draft: Checkpoint | None, engine: Engine) -> dict[str, StoredTensor]:
    """Tensors of a draft by speculators' names."""
    if draft is None:
        return {}
    tensors = {engine.canonical_name(one.name): one for one in draft.tensors.values()}
    for layer in {name.split(".")[1] for name in tensors if name.startswith("layers.")}:
        # the engine's name of the norm that a later layer starts with
        name = f"layers.{layer}.input_layernorm.weight"
        if (theirs := engine.entering_norm(name)) is not None and theirs in tensors:
            tensors[name] = tensors[theirs]
    return tensors


def _path(facts: Mapping[str, Any]) -> Path | None:
    path = facts.get("path")
    return Path(path) if path else None
