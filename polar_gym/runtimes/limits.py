"""The options that every runtime takes: how much of the machine a sandbox may use as a whole."""

from __future__ import annotations

from pydantic import Field

from polar_gym.registry import Options

MEBIBYTE = 1024 * 1024


class LimitOptions(Options):
    """Limits of a sandbox. Where a machine cannot keep one of them, the log and `polar-gym doctor` say so."""

    cpus: float | None = Field(default=None, gt=0)
    """Processor cores of a sandbox; null: all."""
    memory_mb: int = Field(default=8192, gt=0)
    """Memory of a sandbox."""
    pids: int = Field(default=1024, gt=0)
    """Processes and threads of a sandbox."""
    disk_mb: int | None = Field(default=16384, gt=0)
    """How much a sandbox may write. Docker keeps the limit with some storage drivers only (overlay2 on XFS with quotas,
    btrfs, zfs); elsewhere it limits each file alone. The other runtimes keep it as root, and allow no sandbox more than
    an eighth of the space that is free. Where that is less than a quarter of this number, the log says so; where it is
    less than 512 MiB too, no sandbox starts. null: no limit by this number."""

    def shares_network(self) -> bool:
        """Return whether a sandbox with `network: full` may be in the machine's own network, its loopback included."""
        return True
