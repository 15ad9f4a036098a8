"""What a draft's folder is for, where nobody says which engine is to serve it; and writing it for another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle_trace.checkpoints import class_names, read_config
from eagle_trace.errors import CheckpointError, UsageError
from eagle_trace_analysis.checkpoint.export import export
from eagle_trace_analysis.checkpoint.origin import is_state_folder
from eagle_trace_analysis.checkpoint.own_reference import translate
from eagle_trace_analysis.engines import ENGINES, SGLANG, Engine
from eagle_trace_analysis.trainers import trainer_of


@dataclass(frozen=True)
class Purpose:
    """An engine, and why it is this one.

    Attributes:
        engine: the engine.
        why: a clause without a full stop; empty where a user named it.
    """

    engine: Engine
    why: str = ""

    @property
    def others(self) -> str:
        """The options that ask for the other engines."""
        return " or ".join(f"--engine {name}" for name in ENGINES if name != self.engine.NAME)


def purpose_of(draft: Path) -> Purpose:
    """The engine that loads a folder as it is.

    Raises:
        CheckpointError: the folder has no config that can be read.
    """
    if is_state_folder(draft):
        return Purpose(SGLANG, f"it is a checkpoint in training, which SpecForge exports to {SGLANG.TITLE}'s format")
    if draft.is_file():
        return Purpose(SGLANG)  # whoever opens it says what is wrong
    config = read_config(draft)
    trainer = trainer_of(config)
    if trainer is not None:
        for engine in ENGINES.values():
            if trainer.NAME in engine.READS:
                return Purpose(engine, f"{engine.TITLE} loads {trainer.NAME} format as it is")
        return Purpose(SGLANG, f"no engine loads {trainer.NAME} format, and `eagle-trace export` writes this one's")
    for name in class_names(config):
        owners = [engine for engine in ENGINES.values() if name in engine.ARCHITECTURES]
        if len(owners) == 1 and owners[0] is not SGLANG:
            return Purpose(owners[0], f"of the engines known here {owners[0].TITLE} alone has a class {name}")
    return Purpose(SGLANG, f"the config is flat, which is {SGLANG.TITLE}'s format")


def purpose_of_export(draft: Path) -> Purpose:
    """The first engine that does not load a folder as it is: there is nothing to write for one that does.

    Raises:
        CheckpointError: the folder has no config that can be read.
    """
    ready = purpose_of(draft)
    engine = next(one for one in ENGINES.values() if one is not ready.engine)
    return Purpose(engine, f"{ready.engine.TITLE} loads {draft} as it is")


def refuse_swapped(trained: tuple[str, Path | None], deployed: tuple[str, Path | None], servers: Iterable[str]) -> None:
    """Refuse two folders of a draft of which each is in the other's format.

    Nothing is said where that may be meant: a server that loads a trainer's format as it is, a trainer that writes the
    flat one, a folder that cannot be read (whoever opens it says so).

    Args:
        trained, deployed: how each is given (``--trained``), and the folder.
        servers: what is to load the deployed one, by name.

    Raises:
        UsageError: the deployed one is in a trainer's format that none of the servers loads, the trained one in none.
    """
    (trained_as, trained_folder), (deployed_as, deployed_folder) = trained, deployed
    if trained_folder is None or deployed_folder is None:
        return
    try:
        formats = [trainer_of(read_config(folder)) for folder in (trained_folder, deployed_folder)]
    except CheckpointError:
        return
    engines = [ENGINES[name] for name in servers if name in ENGINES]
    format = formats[1]
    if formats[0] is None and format is not None and not any(format.NAME in engine.READS for engine in engines):
        titles = " or ".join(engine.TITLE for engine in engines) or "a server"
        raise UsageError(
            f"{deployed_as} {deployed_folder} is in {format.NAME} format, which {titles} does not load, and "
            f"{trained_as} {trained_folder} is in a server's: were they meant the other way round?"
        )


def write_for(engine: Engine, draft: Path, out: Path, *, target: Path | None = None, force: bool = False) -> list[str]:
    """Write a draft as an engine loads it: one that was trained (`export`), or one in another engine's flat format.

    Returns:
        What to be warned of.

    Raises:
        CheckpointError: the draft cannot be read, or the engine cannot compute it and `force` is off.
        OutputExistsError, RecordingError: `out` holds something, or cannot be written; see `written_whole`.
    """
    if trainer_of(read_config(draft)) is not None or not engine.READS:
        return export(draft, out, target=target, force=force, engine=engine)
    if purpose_of(draft).engine is engine:
        raise CheckpointError(f"{draft} is in {engine.TITLE}'s format already: there is nothing to export")
    if target is None:
        raise CheckpointError(
            f"{draft} is in {purpose_of(draft).engine.TITLE}'s format: give --target, by whose class its layer ids are "
            "read"
        )
    translate(draft, out, target=target, force=force)
    return []
