"""The folders of the control groups of a process."""

from pathlib import Path

from esm_turbo.files.control_groups import control_groups


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("9:pids:/\n4:cpu,cpuacct:/a/b\n0::/c\n")
    assert list(control_groups("cpu", groups, root)) == [
        (1, root / "cpu/a/b"), (1, root / "cpu/a"), (1, root / "cpu"), (2, root / "c"), (2, root),
    ]  # fmt: skip
    assert list(control_groups("memory", groups, root)) == [(2, root / "c"), (2, root)]
    assert list(control_groups("cpu", tmp_path / "absent", root)) == []
