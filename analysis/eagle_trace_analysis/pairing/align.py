"""Alignment: which row of the train trace is which row of the serve trace, and what has no partner and why.

The key of a row is (prompt_key, root, step, path). Prompts are paired by their key, never by their number;
rows of steps >= 1 only where the same tokens were fed on the way down from the root, because with another
token every number differs and none of them says anything.

Everything here is array arithmetic on key columns: the four-part key is packed into one integer a row,
exactly (no hashing), and rows are matched by sorting those integers. 100,000 rows a side take some tens of
milliseconds, and sites that hold the same keys share one match.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eagle_trace.capture import Rows
from eagle_trace.reader import Trace
from eagle_trace.sites import ROW_SITES, TOPK_SITES, known_site
from eagle_trace_analysis.pairing.keys import all_keys, first_of_each, packed, prompt_keys, same_keys, topk_keys
from eagle_trace_analysis.pairing.pairs import CODE_OF, MATCHED, UNMATCHED, Bool, Coverage, Int, Pairs

#: reasons that a row of a replayed trace cannot have: the replay was given its very tokens and chains
_NOT_OF_A_REPLAY = [CODE_OF[reason] for reason in ("other-tokens", "answers-part", "not-given")]


@dataclass(frozen=True)
class Parting:
    """Where two answers to one prompt part.

    Attributes:
        prompt_key: of which prompt.
        at: index of the first token that differs, counted from the start of the prompt.
        together: tokens of the answer before it, the same on both sides.
        reference, other: the token of each side there.
    """

    prompt_key: str
    at: int
    together: int
    reference: int
    other: int

    def words(self, reference: str, other: str) -> str:
        """In words; `reference` and `other` are what the two traces are called."""
        return (
            f"prompt {self.prompt_key!r} at token {self.at}, after {self.together} equal tokens of the answer "
            f"({self.reference} in {reference}, {self.other} in {other})"
        )


class Alignment:
    """The pairs of two traces, site by site, worked out when asked for.

    Attributes:
        train: the train trace.
        serve: the serve trace.
        prompt_keys: keys of the prompts both sides have, in the train side's order.
        rows: pairs of the draft rows themselves (rows.parquet); they carry token and position.
    """

    def __init__(self, train: Trace, serve: Trace) -> None:
        self.train = train
        self.serve = serve
        self._numbers = {key: number for number, key in enumerate(prompt_keys(train.prompts, serve.prompts))}
        tables = train.table("prompts"), serve.table("prompts")
        self._given_train, self._given_serve = (_tokens_given(table, self._numbers) for table in tables)
        #: whether both were recorded on one side: two servers, or two trainers
        self.same_side = train.side == serve.side
        self._cached, self._cached_reference = (_tokens_cached(table, self._numbers) for table in tables[::-1])
        self._parted = _answers_part(*tables, self._numbers)
        on_serve = set(serve.prompts["prompt_key"])
        self.prompt_keys: list[str] = [key for key in train.prompts["prompt_key"] if key in on_serve]
        #: whether training ran this very serve trace again: what it lacks of it then has no excuse
        self.same_run = is_replay(train, serve)
        self._known: list[Pairs] = []
        self._topk: Pairs | None = None
        self.rows = self._match(train.rows, serve.rows)

    @property
    def coverage(self) -> Coverage:
        """Coverage of the draft rows."""
        return self.rows.coverage()

    def pairs(self, site: str) -> Pairs:
        """Pairs of a site's rows; empty if a side has none.

        ``token`` and ``position`` are read from the draft rows, ``topk.*`` from the groups of topk.parquet
        (one row a group, numbered in file order).
        """
        if site in ROW_SITES:
            return self.rows
        if site in TOPK_SITES:
            if self._topk is None:
                self._topk = self._match(topk_keys(self.train), topk_keys(self.serve))
            pairs = self._topk
        else:
            pairs = self._match(all_keys(self.train, site), all_keys(self.serve, site))
        if (known := known_site(site)) is not None and known.rotated:
            pairs = pairs.without(position_offset(pairs) != 0, "position-offset")
        return pairs.excusing(
            train=_excused(self.serve, site, pairs.train_keys),
            serve=_excused(self.train, site, pairs.serve_keys),
        )

    def partings(self) -> list[Parting]:
        """Where answers to equal prompts part, prompt by prompt."""
        of_train, of_serve = (_prompt_tokens(trace.table("prompts")) for trace in (self.train, self.serve))
        found = []
        for key in self.prompt_keys:
            at = int(self._parted[self._numbers[key]])
            if at < np.iinfo(np.int64).max:
                (ours, prompt), (theirs, _) = of_train[key], of_serve[key]
                found.append(Parting(key, at, at - prompt, int(ours[at]), int(theirs[at])))
        return found

    def prompt_key(self, prompt_id: int) -> str:
        """Key of a prompt of the train side."""
        return self._key_of[prompt_id]

    @cached_property
    def _key_of(self) -> dict[int, str]:
        frame = self.train.prompts
        # of a number that was given twice, the first counts
        return {
            int(number): str(key)
            for number, key in zip(frame["prompt_id"][::-1], frame["prompt_key"][::-1], strict=True)
        }

    def _match(self, train: Rows, serve: Rows) -> Pairs:
        for known in self._known:
            if same_keys(known.train_keys, train) and same_keys(known.serve_keys, serve):
                return known
        numbers_t = _renumber(train, self.train.prompts, self._numbers, 0)
        numbers_s = _renumber(serve, self.serve.prompts, self._numbers, 1)
        pairs = match(train, serve, numbers_t, numbers_s)
        for fate, rows, numbers, own, given in (
            (pairs.train_fate, train, numbers_t, self._given_train, self._given_serve),
            (pairs.serve_fate, serve, numbers_s, self._given_serve, self._given_train),
        ):
            # row at root p is fed token p + 1: what the row's own side was not given either excuses nothing
            own, given = (tokens[np.minimum(numbers, len(tokens) - 1)] for tokens in (own, given))
            place = rows.root + 1
            fate[(fate == UNMATCHED) & (place >= given) & (place < own)] = CODE_OF["not-given"]
        cached = train.root < self._cached[np.minimum(numbers_t, len(self._cached) - 1)]
        pairs.train_fate[(pairs.train_fate == UNMATCHED) & cached] = CODE_OF["prefix-cache"]
        if self.same_side:
            cached = serve.root < self._cached_reference[np.minimum(numbers_s, len(self._cached_reference) - 1)]
            pairs.serve_fate[(pairs.serve_fate == UNMATCHED) & cached] = CODE_OF["prefix-cache"]
        # two greedy answers may part for a rounding error of the target: what follows is no fault of the draft
        parted_t, parted_s = (
            rows.root + 1 >= self._parted[np.minimum(numbers, len(self._parted) - 1)]
            for rows, numbers in ((train, numbers_t), (serve, numbers_s))
        )
        pairs = pairs.without(parted_t[pairs.train], "answers-part")
        for fate, parted in ((pairs.train_fate, parted_t), (pairs.serve_fate, parted_s)):
            fate[(fate == UNMATCHED) & parted] = CODE_OF["answers-part"]
        if self.same_side:
            # each drafts from where its own rounds begin, which is nobody's fault
            for fate, rows in ((pairs.train_fate, train), (pairs.serve_fate, serve)):
                fate[(fate == UNMATCHED) & (rows.step > 0)] = CODE_OF["not-drafted"]
        if self.same_run:
            pairs.serve_fate[np.isin(pairs.serve_fate, _NOT_OF_A_REPLAY)] = UNMATCHED
        self._known.append(pairs)
        return pairs


def is_replay(train: Trace, serve: Trace) -> bool:
    """Whether the train trace says that it replays this very serve trace, and not another of the same prompts."""
    name = serve.manifest.recording
    return bool(name) and train.manifest.settings.get("replayed") == name


def replays_another(train: Trace, serve: Trace) -> bool:
    """Whether both traces say which recording they are of, and it is not the same one."""
    return bool(serve.manifest.recording and train.manifest.settings.get("replayed")) and not is_replay(train, serve)


def align(train: Trace, serve: Trace) -> Alignment:
    """Line up two traces by (prompt_key, root, step, path)."""
    return Alignment(train, serve)


def match(train: Rows, serve: Rows, train_prompts: Int, serve_prompts: Int) -> Pairs:
    """Match rows by (prompt, root, step, path).

    Args:
        train: keys of the train side, T rows.
        serve: keys of the serve side, S rows.
        train_prompts: number of each train row's prompt, the same number on both sides for the same key,
            int64 [T].
        serve_prompts: the same for the serve side, int64 [S].
    """
    count = len(train)
    place, code = packed(train, serve, train_prompts, serve_prompts)
    place_t, place_s, code_t, code_s = place[:count], place[count:], code[:count], code[count:]
    fate_t, first_t = first_of_each(train, code_t)
    fate_s, first_s = first_of_each(serve, code_s)

    _, at_t, at_s = np.intersect1d(code_t[first_t], code_s[first_s], assume_unique=True, return_indices=True)
    pair_t, pair_s = first_t[at_t], first_s[at_s]
    order = np.argsort(pair_t, kind="stable")
    pair_t, pair_s = pair_t[order], pair_s[order]
    fate_t[pair_t] = fate_s[pair_s] = MATCHED

    _explain(fate_t, train, code_t, place_t, serve, code_s, place_s)
    _explain(fate_s, serve, code_s, place_s, train, code_t, place_t)
    return Pairs(pair_t, pair_s, train, serve, fate_t, fate_s)


def position_offset(pairs: Pairs) -> Int:
    """Train position minus serve position of each pair, int64 [P]."""
    train, serve = pairs.train_keys.position[pairs.train], pairs.serve_keys.position[pairs.serve]
    return train.astype(np.int64) - serve


def not_materialised(trace: Trace, site: str) -> dict[str, str]:
    """Rows of `site` that `trace`'s host never computes, with the reason: {} if its manifest does not name
    the site.

    The rows are ``all``, ``prefill``, or a description. An entry for ``*`` is about rows, not about a site:
    such rows are known one by one from `Rows.own_path`, so it excuses nothing here.
    """
    entries = [entry for entry in trace.manifest.not_materialised if entry.get("site", "*") != "*"]
    return {
        entry.get("rows", "all"): entry.get("why") or "its host never computes it"
        for entry in entries
        if fnmatchcase(site, entry["site"])
    }


def _excused(trace: Trace, site: str, keys: Rows) -> Bool | None:
    """Which rows of the other side have no partner because `trace`'s host never computes them; None if it
    says nothing.
    """
    which = not_materialised(trace, site)
    if not which:
        return None
    if set(which) == {"prefill"}:
        at_step_0: Bool = keys.step == 0
        return at_step_0
    return np.ones(len(keys), dtype=np.bool_)


def _explain(
    fate: NDArray[np.int8], rows: Rows, code: Int, place: Int, other: Rows, other_code: Int, other_place: Int
) -> None:
    """Turn unmatched rows that have a reason into skipped ones, in place."""
    alone = np.flatnonzero((fate == UNMATCHED) & (rows.step > 0))
    if not alone.size:
        return
    branches = ~other.own_path
    if branches.any():
        fate[alone[np.isin(code[alone], other_code[branches])]] = CODE_OF["other-branch"]
        alone = alone[fate[alone] == UNMATCHED]
    fate[alone[np.isin(place[alone], other_place)]] = CODE_OF["other-tokens"]


def _tokens_given(prompts: pa.Table, numbers: dict[str, int]) -> Int:
    """How many tokens of each prompt a side was given, by the prompt's common number; unlimited where it has
    no such prompt.
    """
    given = np.full(len(numbers) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    lengths = pc.list_value_length(prompts.column("token_ids")).to_pylist()
    for key, length in zip(prompts.column("prompt_key").to_pylist(), lengths, strict=True):
        given[numbers[key]] = np.iinfo(np.int64).max if length is None else length
    return given


def _tokens_cached(prompts: pa.Table, numbers: dict[str, int]) -> Int:
    """How many tokens of each prompt the server took from its prefix cache, by the prompt's common number."""
    cached = np.zeros(len(numbers) + 1, dtype=np.int64)
    table = prompts.select(["prompt_key", "cached_tokens"])
    for key, count in zip(*(column.to_pylist() for column in table.columns), strict=True):
        cached[numbers[key]] = count or 0
    return cached


def unequal_tokens(a: NDArray[np.integer], b: NDArray[np.integer]) -> Int:
    """Where two runs of tokens of the same length differ; a token that is not known (-1, see docs/training.md) does
    not differ.
    """
    return np.flatnonzero((a != b) & (a >= 0) & (b >= 0))


def _answers_part(train: pa.Table, serve: pa.Table, numbers: dict[str, int]) -> Int:
    """Index of the first token that differs behind an equal prompt, by the prompt's common number; beyond any
    index where no token differs, or where the prompts themselves do (that is a divergence, not a skip).
    """
    parted = np.full(len(numbers) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    of_train, of_serve = _prompt_tokens(train), _prompt_tokens(serve)
    for key in of_train.keys() & of_serve.keys():
        (ours, prompt), (theirs, other_prompt) = of_train[key], of_serve[key]
        common = min(len(ours), len(theirs))
        differ = unequal_tokens(ours[:common], theirs[:common])
        if len(differ) and differ[0] >= max(prompt, other_prompt):
            parted[numbers[key]] = differ[0]
    return parted


def _prompt_tokens(prompts: pa.Table) -> dict[str, tuple[NDArray[np.int32], int]]:
    """Tokens of each prompt and how many of them are the prompt's own, by its key."""
    tokens = pc.list_flatten(prompts.column("token_ids")).to_numpy()
    ends = np.cumsum(pc.list_value_length(prompts.column("token_ids")).fill_null(0).to_numpy())
    lengths = prompts.column("num_prompt_tokens").fill_null(0).to_pylist()
    keys = prompts.column("prompt_key").to_pylist()
    return dict(zip(keys, zip(np.split(tokens, ends[:-1]), lengths, strict=True), strict=True)) if keys else {}


def _renumber(rows: Rows, prompts: pd.DataFrame, numbers: dict[str, int], side: int) -> Int:
    """Prompt numbers that mean the same on both sides; a prompt that prompts.parquet does not name matches
    nothing.
    """
    known = dict(zip(prompts["prompt_id"].tolist(), prompts["prompt_key"].map(numbers).tolist(), strict=True))
    ids, inverse = np.unique(rows.prompt_id, return_inverse=True)
    mapped = [known.get(int(prompt), len(numbers) + 2 * k + side) for k, prompt in enumerate(ids)]
    return np.array(mapped, dtype=np.int64)[inverse]
