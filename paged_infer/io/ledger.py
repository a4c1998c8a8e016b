"""What is known of an unfinished job beside its rows: a small file, replaced as a whole after the rows are safe."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from paged_infer.config import ConfigError
from paged_infer.io.stream import sync_folder

FORMAT = 1


@dataclass(frozen=True, slots=True)
class State:
    """How far a job is.

    Attributes:
        open_row: number of the first input row that is not sealed; all before it are answered and in their final place.
        sealed: where those are, as the target of the results describes it.
        counts: figures of the sealed results (`ResultCounts.to_json`).
        position: where the first input row that is not sealed begins; None = at the start.
        journal_bytes, journal_crc32: what is known to be safe of the rows beyond those.
    """

    open_row: int = 0
    sealed: Mapping[str, Any] | None = None
    counts: Mapping[str, Any] | None = None
    position: Mapping[str, Any] | None = None
    journal_bytes: int = 0
    journal_crc32: int = 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """The file's contents.

    Attributes:
        fingerprint: of everything the results depend on.
        run_seed: the seed from which the rows' noise is drawn.
        state: how far the job is.
        successor: how far it is if the journal is the one this describes: it is about to take the other's place.
        answers: in which row the answer to a request stands, by a digest of the request; only some are known.
        finished: all rows are sealed, the results are about to take their final name.
        heartbeat: when, where and by which process this was written.
    """

    fingerprint: Mapping[str, Any]
    run_seed: int
    state: State = field(default_factory=State)
    successor: State | None = None
    answers: Mapping[str, int] = field(default_factory=dict)
    finished: bool = False
    heartbeat: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replace the file; it is durable on return."""
        beat = {"time": datetime.now(UTC).isoformat(), "host": socket.gethostname(), "process": os.getpid()}
        data = {"format": FORMAT, **asdict(replace(self, heartbeat=beat))}
        replace_file(path, orjson.dumps(data, option=orjson.OPT_INDENT_2))

    @classmethod
    def load(cls, path: Path) -> Ledger | None:
        """The ledger at `path`; None where there is none. Raises `ConfigError` for one that cannot be used."""
        try:
            data = orjson.loads(path.read_bytes())
            if data.pop("format") != FORMAT:
                raise ConfigError(f"{path} was written by another version of paged-infer: --overwrite to start again")
            state, successor = State(**data.pop("state")), data.pop("successor")
            return cls(state=state, successor=None if successor is None else State(**successor), **data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be used ({error}): --overwrite to start again") from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that its name always stands for the old or the new contents, never for less."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
