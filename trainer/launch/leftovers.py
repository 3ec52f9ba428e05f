"""What earlier launches left in a run directory, taken away only where it cannot be a living job's."""

from __future__ import annotations

import os
import shutil

from trainer.gate.beats import beats_in
from trainer.run_directory import RunDirectory


class Leftovers:
    """An old stop file; of a smoke test the whole directory, which is its own. All methods raise OSError."""

    def __init__(self, run: RunDirectory, smoke: bool) -> None:
        self._run, self._smoke = run, smoke
        self._old_stop: int | None = None  # when the stop file was made that was there at first

    def clear_at_once(self) -> None:
        """Before the gate, which looks how much room there is: an old smoke test, where no heartbeat is young."""
        beats = beats_in(f"{self._run.path}/heartbeat")
        if self._smoke and all(beat["alive"] is False for beat in beats):
            self._clear_smoke()
        self._old_stop = self._stop_made_at()

    def clear(self) -> str | None:
        """After a gate that is open: it knows, from all nodes, that nobody is alive.

        The stop file's path, where one was removed. One that came since this launch began is meant for it, and stays.
        """
        if self._smoke:
            self._clear_smoke()
        elif self._old_stop is not None and self._stop_made_at() == self._old_stop:
            self._run.stop_file.unlink(missing_ok=True)
            return str(self._run.stop_file)
        return None

    def _clear_smoke(self) -> None:
        """Not what the gate has just written."""
        try:
            names = os.listdir(self._run.path)
        except FileNotFoundError:
            return
        for path in (self._run.path / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self._run.gate_json, self._run.launch_lock):
                path.unlink()

    def _stop_made_at(self) -> int | None:
        try:
            return self._run.stop_file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
