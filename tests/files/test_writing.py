"""Atomic writes, one writer per folder, and errors that name the file."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock
import pytest
from safetensors import SafetensorError

from esm_turbo.files import writing
from esm_turbo.files.paths import NotWritableError, check_writable
from esm_turbo.files.writing import (
    LOCK_FILE,
    FolderBusyError,
    file_errors,
    held_temporaries,
    is_temporary,
    locked_temporary,
    only_writer,
    refuse_links,
    remove_temporaries,
    replacing,
)


def test_replacing_serves_any_writer(tmp_path):
    path = tmp_path / "new" / "table.csv"
    with replacing(path) as temporary:
        temporary.write_text("a,b")
        assert not path.exists()
        # In a folder of its own, on the same disk.
        assert temporary.parent.parent == path.parent and is_temporary(temporary.parent.name)
    assert path.read_text() == "a,b"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("renaming", [True, False])
def test_a_failed_write_leaves_the_old_file_or_none(tmp_path, monkeypatch, error, existing, renaming):
    path = tmp_path / "x"
    if existing:
        path.write_text("old")

    def fail(*_):
        raise error

    if renaming:
        monkeypatch.setattr(writing.os, "replace", fail)
    with pytest.raises(type(error)), replacing(path) as temporary:
        temporary.write_text("half")
        if not renaming:
            fail()
    assert [p.name for p in tmp_path.iterdir()] == (["x"] if existing else [])
    assert not existing or path.read_text() == "old"


def test_a_file_is_complete_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []

    def replace(source, target):
        # Beside the file: elsewhere, a rename could become a copy.
        seen.append((source.parent.parent, source.read_text()))
        os.rename(source, target)

    monkeypatch.setattr(writing.os, "replace", replace)
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text("complete")
    assert seen == [(tmp_path, "complete")]


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "folder"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_are_those_of_a_new_file(tmp_path, umask):
    previous = os.umask(umask)
    try:
        with replacing(tmp_path / "x"):
            pass
        assert os.umask(umask) == umask
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


def test_a_pipe_is_written_to_and_kept(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_writable(path)
    # Open at both ends, so that neither blocks.
    handle = os.open(path, os.O_RDWR)
    try:
        with replacing(path) as temporary:
            assert temporary.parent != tmp_path
            temporary.write_bytes(b"result")
        assert os.read(handle, 100) == b"result"
    finally:
        os.close(handle)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert not temporary.exists()


def test_a_link_is_kept_and_its_target_replaced(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link, target = tmp_path / "link", folder / "x"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as temporary:
        assert temporary.parent.parent == folder
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["elsewhere", "link", "x"]


# A process that holds the lock until its input ends.
HOLDER = """
import sys
from esm_turbo.files.writing import only_writer
with only_writer(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_ends_or_dies(tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FolderBusyError, match=f"{folder}: another process is writing into it; let it finish"):
            only_writer(folder).__enter__()
        with pytest.raises(FolderBusyError, match=r"\(waited 0.05 s\)"):
            only_writer(folder, timeout=0.05).__enter__()
        holder.kill()
    assert (folder / LOCK_FILE).exists()
    with only_writer(folder):
        (folder / "x").write_text("kept")
    assert [p.name for p in folder.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(NotWritableError, match=f"{tmp_path}: cannot be written .Read-only file system.; choose"):
        only_writer(tmp_path).__enter__()


def test_an_empty_folder_and_the_lock_are_removed_unless_kept(tmp_path):
    with only_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).exists()
    assert not (tmp_path / "a" / "b").exists()
    with only_writer(tmp_path / "c", keep=True):
        pass
    assert (tmp_path / "c" / LOCK_FILE).exists()


def test_a_lock_file_that_its_last_owner_removes_is_not_taken(tmp_path, monkeypatch):
    """Of two writers one would have the old file, and the other the new one."""
    import fcntl

    lock, path, removed = fcntl.flock, tmp_path / LOCK_FILE, []

    def late(handle, flags):
        if not removed:
            removed.append(path.unlink())
        return lock(handle, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with only_writer(tmp_path, timeout=60, keep=True):
        assert removed
        with pytest.raises(FolderBusyError):
            only_writer(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("error", "message", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "out: cannot be written (No space left on device)", 28),
        (OSError("odd"), "out: cannot be written (odd)", None),
        (SafetensorError("I/O error"), "out: cannot be written (I/O error)", None),
    ],
)
def test_errors_name_the_file(error, message, number):
    with pytest.raises(OSError) as caught, file_errors("out"):
        raise error
    assert str(caught.value) == message
    assert caught.value.errno == number
    assert caught.value.__cause__ is error
    with pytest.raises(KeyError), file_errors("out"):
        raise KeyError("x")


def test_a_link_inside_a_folder_of_the_package_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link, inside=True) as temporary:
        temporary.write_text("new")
    assert (link.is_symlink(), link.read_text(), target.read_text()) == (False, "new", "old")


def test_links_on_the_way_to_a_file_are_refused(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / "a").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(root)
    # The folder itself may be reached by a link; what is in it, not.
    refuse_links(tmp_path / "link" / "a" / "x", tmp_path / "link")
    (root / "a" / "b").symlink_to(elsewhere)
    for path in (root / "a" / "b", root / "a" / "b" / "x"):
        with pytest.raises(ValueError, match="a/b: is a symbolic link, which is not followed here; remove it"):
            refuse_links(path, root)
    (root / LOCK_FILE).symlink_to(elsewhere / "new")
    with pytest.raises(ValueError, match=r"\.lock: is a symbolic link"), only_writer(root):
        pass
    assert list(elsewhere.iterdir()) == []


# A process that writes a file until its input ends.
WRITER = """
import sys
from esm_turbo.files.writing import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print(temporary.parent, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", [None, "table.csv"])
def test_temporaries_are_removed_once_their_process_is_dead(tmp_path, name):
    command = [sys.executable, "-c", WRITER, tmp_path / "table.csv"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        temporary = Path(writer.stdout.readline().strip())
        assert is_temporary(temporary.name)
        remove_temporaries(tmp_path, name)
        assert (temporary / "table.csv").read_text() == "half"
        writer.kill()
    assert temporary.exists()
    remove_temporaries(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_the_next_write_removes_what_a_killed_one_left_of_the_same_file(tmp_path):
    """What other commands left, or are writing, stays: also of a file whose name begins with this one's."""
    left = [tmp_path / f".{name}.abcdefgh.tmp" for name in ("run1", "run1.h5", "run10")]
    for one in left:
        one.mkdir()
        (one / "half").write_text("")
    with replacing(tmp_path / "run1") as temporary:
        temporary.write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["run1", *(one.name for one in left[1:])])


def test_only_names_of_temporaries_are_removed(tmp_path):
    kept = ["table.csv", "notes.tmp", ".lock", ".x.short.tmp", ".tmpAbC123"]
    for other in (".other.csv.abcdefgh.tmp", *kept):
        (tmp_path / other).write_text("")
    assert not any(map(is_temporary, kept))
    remove_temporaries(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_the_error_of_a_part_names_the_whole_file(tmp_path):
    with pytest.raises(OSError) as caught, replacing(tmp_path / "x") as temporary, file_errors(temporary):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == f"{tmp_path / 'x'}: cannot be written (No space left on device)"
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_can_never_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", self)

    monkeypatch.setattr(Path, "mkdir", refuse)
    message = r"out: cannot be written \(Read-only file system\); choose another path"
    with pytest.raises(NotWritableError, match=message), only_writer(tmp_path / "out"):
        pass


def test_held_temporaries_are_those_of_living_processes(tmp_path: Path) -> None:
    (tmp_path / ".claim.abcd1234.tmp").mkdir()
    with locked_temporary(tmp_path, "claim") as mine, locked_temporary(tmp_path, "other"):
        assert mine.is_dir()
        assert list(held_temporaries(tmp_path, "claim")) == [mine]
    assert list(held_temporaries(tmp_path, "claim")) == []
    assert [path.name for path in tmp_path.iterdir()] == [".claim.abcd1234.tmp"]


@pytest.mark.parametrize("removes", [True, False])
def test_a_temporary_that_others_hold_or_remove_is_made_again(tmp_path, monkeypatch, removes):
    """As by a process that is just starting, which sweeps the folder before a new temporary is locked."""
    import fcntl

    made, held, make = [], [], tempfile.mkdtemp

    def mkdtemp(**options):
        made.append(make(**options))
        if len(made) < 5:
            held.append(os.open(made[-1], os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
            if removes:
                os.rmdir(made[-1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with locked_temporary(tmp_path, "claim") as mine:
        assert (str(mine), len(made)) == (made[-1], 5)
        assert [*held_temporaries(tmp_path, "claim")] == [mine] and [*tmp_path.iterdir()] == [mine]
    assert not [*tmp_path.iterdir()]
    for handle in held:
        os.close(handle)
