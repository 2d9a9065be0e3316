"""Resuming a run: its newest complete checkpoint, and the time spent before."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from ..errors import PosencError
from .manifest import newest_whole, refuse_other_settings
from .settings import Settings
from .settings_file import complete_settings

FILE = "run.json"
console = Console(stderr=True)


@dataclass(frozen=True)
class Past:
    """Time and commands of a run up to a checkpoint, over all times it was resumed. Saved in the checkpoint."""

    seconds: float = 0.0
    """From the start of the command, including measurements."""
    training_seconds: float = 0.0
    commands: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, checkpoint: Path | None) -> Past:
        file = None if checkpoint is None else checkpoint / FILE
        return cls(**json.loads(file.read_text())) if file is not None and file.exists() else cls()

    def write(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(json.dumps(asdict(self)))


class Clock:
    """Continues the times of a resumed run."""

    def __init__(self, past: Past | None = None, command: str = ""):
        self.past, self.command = past or Past(), command
        self.started = time.monotonic()
        self.training: float | None = None

    def now(self) -> Past:
        here = time.monotonic()
        training = 0.0 if self.training is None else here - self.training
        commands = [*self.past.commands, self.command]
        return Past(self.past.seconds + here - self.started, self.past.training_seconds + training, commands)


def find_checkpoint(settings: Settings, resume: bool) -> Path | None:
    """The checkpoint to resume from; None for a new run. Existing checkpoints are never overwritten."""
    main_process = PartialState().is_main_process
    say = partial(console.print, soft_wrap=True) if main_process else lambda *words: None
    output = Path(settings.output)
    found = newest_whole(output)
    if not resume:
        if found.checkpoint or found.damaged:
            raise PosencError(f"{output} holds checkpoints of a run. Resume it (--resume), or name another --output.")
        return None
    for name, why in found.damaged.items():
        say(f"[yellow]{name} is not complete: {why}. It is not used.[/]")
    if found.checkpoint is None:
        if found.damaged:
            raise PosencError(
                f"{output} has no complete checkpoint to resume from. Start again with another --output."
            )
        say(f"{output} holds no checkpoint yet: the run starts from the beginning.")
        return None
    refuse_other_settings(found.checkpoint, settings.of_run(), complete_settings)
    say(f"Resuming from {found.checkpoint}.")
    PartialState().wait_for_everyone()  # all have looked
    for name in found.damaged if main_process else ():  # the run will write checkpoints of these names again
        shutil.move(output / name, output / f"damaged-{name}-{int(time.time())}")
    return found.checkpoint
