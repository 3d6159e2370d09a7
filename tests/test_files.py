"""Files are written completely or not at all, and later it shows whether they were changed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from exportkit.errors import DestinationError, InvalidTypeError
from exportkit.files import TEMPORARY, abandoned_folders, as_path, check_folder, digest_of, replacing, stamp_of


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def throw(error):
    raise error


def write(target, last="", clear=None, **contents):
    with replacing(target, "a thing", last, clear) as folder:
        for name, text in contents.items():
            (folder / name).write_text(text)


@pytest.mark.parametrize("value", [None, 5, [], b"x".join])
def test_what_is_no_path_is_named(value):
    with pytest.raises(InvalidTypeError, match="Not a path"):
        as_path(value)


def test_new_files_replace_those_of_the_same_name_only(tmp_path):
    (tmp_path / "other").write_text("mine")
    write(tmp_path, a="1", b="2")
    write(tmp_path, a="3")

    assert [(tmp_path / name).read_text() for name in ("a", "b", "other")] == ["3", "2", "mine"]
    assert names(tmp_path) == ["a", "b", "other"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), KeyboardInterrupt()])
def test_an_error_leaves_everything_as_it_was(tmp_path, error):
    write(tmp_path / "old", a="1")
    for target in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(DestinationError if isinstance(error, OSError) else type(error)) as raised:
            write(target, clear=lambda: throw(error), a="2")
    if isinstance(error, OSError):
        assert "A thing cannot be written here." in str(raised.value)
        assert "No space left on device" in str(raised.value)
    assert names(tmp_path) == ["old/a"]
    assert (tmp_path / "old" / "a").read_text() == "1"


KILLED = """
import os, sys
from pathlib import Path
from exportkit import files
target, at = Path(sys.argv[1]), sys.argv[2]
def stop(*_):
    print("ready", flush=True)
    sys.stdin.read()
if at == "moving":
    moved = os.replace
    def replace_first(source, place):
        moved(source, place)
        stop()
    os.replace = replace_first
with files.replacing(target, "a thing", "last") as folder:
    (folder / "big").write_text("x" * 1000)
    (folder / "last").write_text("listed: big")
    if at == "writing":
        (folder / "last").unlink()
        stop()
"""


@pytest.fixture(params=["writing", "moving"])
def running(request, tmp_path):
    """A process that stopped in the middle of its work, and the folder that it writes to."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out"), request.param]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield process, tmp_path / "out"
    process.kill()
    process.communicate()


def is_ours(folder):
    return (folder / "last").exists()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_process_left_does_not_block_the_next_one(running, sent):
    process, target = running
    process.send_signal(sent)
    process.wait()
    assert [path.name.startswith(TEMPORARY) for path in abandoned_folders(target)] == [True]

    assert check_folder(target, "a thing", is_ours) == target
    write(target, last="last", last_="", clear=lambda: (target / "big").unlink(missing_ok=True))
    assert names(target) == ["last_"]
    assert abandoned_folders(target) == []


def test_another_process_that_still_writes_is_left_alone(running):
    process, target = running
    assert abandoned_folders(target) == []
    write(target, a="1")

    assert [name for name in names(target) if name.startswith(TEMPORARY)]
    process.communicate(b"")
    assert process.returncode == 0
    assert {"a", "big"} <= {*names(target)}


def test_a_link_is_no_temporary_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / f"{TEMPORARY}x").symlink_to(tmp_path / "mine")
    write(tmp_path, a="1")

    assert (tmp_path / "mine" / "file").exists()


def test_digests_are_those_of_xxh128sum(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "long").write_bytes(b"exportkit" * 300_000)

    assert digest_of(tmp_path / "empty") == "99aa06d3014798d86001c324468d497f"
    assert digest_of(tmp_path / "long") != digest_of(tmp_path / "empty")


def test_every_bit_counts(tmp_path):
    file = tmp_path / "file"
    content = bytearray(range(256)) * 5000
    file.write_bytes(content)
    digests = {digest_of(file)}
    for position in (0, 7, 2**20, len(content) - 1):
        for bit in range(8):
            content[position] ^= 1 << bit
            file.write_bytes(content)
            digests.add(digest_of(file))
            content[position] ^= 1 << bit
    assert len(digests) == 33


def test_a_stamp_changes_when_a_file_is_written_or_replaced(tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("1")
    stamps = [stamp_of(file)]
    time.sleep(0.02)  # longer than a tick of the clock of the file system
    file.write_text("2")
    stamps.append(stamp_of(file))
    other.write_text("2")
    os.utime(other, ns=(stamps[1][3], stamps[1][3]))
    os.replace(other, file)
    stamps.append(stamp_of(file))

    assert len({*stamps}) == 3
    assert stamp_of(file) == stamps[2]
