"""Roles: of two traces one is the *reference* and one the *other*, whatever sides they were recorded on.

Inside the analysis the reference is called ``train`` and the other ``serve``, as in the pair the tool was made for.
What is said to a reader of another pair (two servers, two trainers) takes its words from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

from eagle_trace.printable import html_text

T = TypeVar("T")
P = TypeVar("P", bound="_HasSide")
SIDES = ("train", "serve")
#: places of the two names in a sentence, until all of it is said: characters that no text of ours has
_A, _B = "\ue000", "\ue001"
#: fields that hold names for programs, paths or figures, and no sentence
_VERBATIM = frozenset({"traces", "site", "kind", "verdict", "name", "cause", "row", "level", "statistic", "changed"})


class _HasSide(Protocol):
    @property
    def side(self) -> Any: ...


def in_order(reference: P, other: P) -> tuple[P, P]:
    """Two traces with the reference first: as given, but a train trace is the reference of a serve trace either way."""
    swapped = (reference.side, other.side) == SIDES[::-1]
    return (other, reference) if swapped else (reference, other)


@dataclass(frozen=True)
class Roles:
    """What the two traces are called.

    Attributes:
        reference, other: names, as short as tells them apart.
        sides: ``train`` or ``serve`` of each.
    """

    reference: str = "training"
    other: str = "serving"
    sides: tuple[str, str] = SIDES

    @property
    def usual(self) -> bool:
        """A train trace and a serve trace: the words of the code are the reader's."""
        return self.sides == SIDES

    @property
    def servers(self) -> bool:
        """Two serve traces."""
        return self.sides == ("serve", "serve")

    @classmethod
    def of(cls, traces: Mapping[str, Mapping[str, Any]]) -> Roles:
        """Roles of the two traces of `Diff.traces`: named by host, by host and release where they are of one host, else
        A and B.
        """
        sides = (str(traces["train"].get("side")), str(traces["serve"].get("side")))
        if sides == SIDES:
            return cls()
        for names in (_hosts(traces, release=False), _hosts(traces, release=True)):
            if names[0] != names[1] and all(names):
                return cls(*names, sides)
        return cls("A", "B", sides)

    def say(self, text: str) -> str:
        """A sentence about training and serving, said of these two traces; as it is for the usual pair."""
        if self.usual:
            return text
        return self._named(text, self.reference, self.other)

    @staticmethod
    def _named(text: str, reference: str, other: str) -> str:
        for pattern, words in _PHRASES:
            text = pattern.sub(words, text)
        # names come from manifests: nothing in them is a pattern, a phrase or the other name's place
        parts = re.split(f"({_A}|{_B})", text)
        return "".join({_A: reference, _B: other}.get(part, part) for part in parts)

    def say_html(self, page: str) -> str:
        """`say` for the text between the tags of a piece of HTML, its scripts and styles left alone."""
        if self.usual:
            return page
        parts = re.split(r"(<(?:script|style)\b.*?</(?:script|style)>|<[^>]*>)", page, flags=re.S)
        names = html_text(self.reference), html_text(self.other)
        return "".join(part if at % 2 else self._named(part, *names) for at, part in enumerate(parts))

    def said(self, one: T) -> T:
        """Plain data (dataclasses, tuples, mappings) with every sentence in it said of these two traces."""
        return one if self.usual else self._said(one)

    def _said(self, one: Any) -> Any:
        if isinstance(one, str):
            return self.say(one)
        if isinstance(one, tuple) and not hasattr(one, "_fields"):
            return tuple(self._said(each) for each in one)
        if is_dataclass(one) and not isinstance(one, type):
            changed = {}
            for field in fields(one):
                if field.init and field.name not in _VERBATIM:
                    value = getattr(one, field.name)
                    if isinstance(value, str | tuple) or is_dataclass(value):
                        changed[field.name] = self._said(value)
            return replace(one, **changed)
        return one


def _hosts(traces: Mapping[str, Mapping[str, Any]], *, release: bool) -> tuple[str, str]:
    def name(facts: Mapping[str, Any]) -> str:
        host = str(facts.get("host") or "")
        version = (facts.get("packages") or {}).get(host) if release else None
        return f"{host} {version}" if version else host

    return name(traces["train"]), name(traces["serve"])


#: what is said of a training and a server, and of two traces A and B that are not that
_TABLE = (
    (r"Training and serving", "<A> and <B>"),
    (r"train and serve(?= (?:first )?part)", "<A> and <B>"),
    (
        r"record the train(?:ing)? side(?: again)? with --replay(?: on the same prompts)?",
        "record <A> again on the same prompts",
    ),
    (r"are the training's", "are <A>'s"),
    (r"[Tt]he train(?:ing)? (?:side|trace)'s", "<A>'s"),
    (r"[Tt]he serv(?:e|ing) (?:side|trace)'s", "<B>'s"),
    (r"[Tt]he train(?:ing)? (?:side|trace)", "<A>"),
    (r"[Tt]he serv(?:e|ing) (?:side|trace)", "<B>"),
    (r"the train(?:ing)?'s", "<A>'s"),
    (r"the server's own", "<B>'s own"),
    (r"[Tt]he server's", "<B>'s"),
    (r"[Tt]he server", "<B>"),
    (r"the training forward", "<A>'s forward"),
    (r"a training", "<A>"),
    (r"[Tt]he training", "<A>"),
    (r"the deployed (config|folder|checkpoint|draft|ids|theta|limit)", r"<B>'s \1"),
    (r"deployed", "<B>'s"),
    (r"serve rows have a train row", "rows of <B> have one in <A>"),
    (r"comparable serve rows", "comparable rows of <B>"),
    (r"comparable serve rows have a train row", "comparable rows of <B> have one in <A>"),
    (r"have a train row", "have one in <A>"),
    (r"(train|training) rows", "rows of <A>"),
    (r"(serve|serving) rows", "rows of <B>"),
    (r"train positions", "positions of <A>"),
    (r"against serve", "against <B>"),
    (r"serve against train", "<B> against <A>"),
    (r"serve is", "<B> is"),
    (r"x train", "x <A>"),
    (r"not as trained", "not as in <A>"),
    (r"as trained", "as in <A>"),
    (r"(is|are) not the trained ones?", r"\1 not <A>'s"),
    (r"(was|were) not trained", r"\1 not in <A>"),
    (r"the trained ones?", "<A>'s"),
    (r"[Tt]he trained", "<A>'s"),
    (r"as served", "as in <B>"),
    (r"rows served", "rows of <B>"),
    (r"position served", "position in <B>"),
    (r"served(?= target id)", "<B>'s"),
    (r"trained(?= target id)", "<A>'s"),
    (r"(?<=\d )trained", "in <A>"),
    (r"(?<=\d )served", "in <B>"),
    (r"trained(?= [\d\[])", "<A>"),
    (r"trained", "<A>'s"),
    (r"[Tt]raining(?! trace)", "<A>"),
    (r"[Ss]erving", "<B>"),
    (r"train(?= (?:\d|\[|side|present|absent|token|position|norm|-))", "<A>"),
    (r"serve(?= (?:\d|\[|side|present|absent|token|position|norm|-))", "<B>"),
    (r"(?<=\bin )train", "<A>"),
    (r"(?<=\bin )serve", "<B>"),
    (r"(?<=\()train(?=\))", "<A>"),
    (r"(?<=\()serve(?=\))", "<B>"),
    (r"server", "<B>"),
)


def _phrases() -> list[tuple[re.Pattern[str], str]]:
    # not part of an option, a path, a name in quotes or a file
    start, end = r"(?<![\w./\-'\"`=])(?<!--mode )", r"(?![\w/\-=]|\.\w)"
    return [
        (re.compile(start + pattern + end), words.replace("<A>", _A).replace("<B>", _B)) for pattern, words in _TABLE
    ]


_PHRASES = _phrases()
