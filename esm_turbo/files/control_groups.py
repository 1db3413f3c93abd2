"""The control groups of Linux, which limit what a process may use, as in a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS, CGROUPS_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, groups: Path = CGROUPS, root: Path = CGROUPS_ROOT) -> Iterator[tuple[int, Path]]:
    """Linux: the folders of this process's control groups and of those above them, whose limits all apply.

    Args:
        controller: such as `memory` or `cpu`.
        groups: where the kernel lists them.
        root: where they are mounted.

    Yields:
        The version of a control group, 1 or 2, and its folder, which may be missing.
    """
    try:
        entries = [line.split(":", 2) for line in groups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, group in entries:
        if controllers and controller not in controllers.split(","):
            continue
        version, top = (1, root / controller) if controllers else (2, root)
        # In a container, `group` may be a path outside, and `top` be the group.
        inner = top / group.lstrip("/")
        yield from ((version, folder) for folder in (inner, *inner.parents) if folder.is_relative_to(top))
