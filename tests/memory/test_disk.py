"""Disks that are missing, full, slow, broken or no disks at all; each by name."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from pathlib import Path

import pytest
import torch

from lightning_ptm.errors import ConfigError, InternalError, PageIOError, format_bytes
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.disk import DiskRegion, check_folders, file_system_type, make_folders
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.memory.region import HostRegion
from lightning_ptm.terms import Tier

from .conftest import PAGE, MakeAllocator
from .files import SHORT, ScriptedFiles


def region(path: Path, *, frames: int = 2, files: ScriptedFiles | None = None) -> DiskRegion:
    return DiskRegion([path], page_size=PAGE, total_frames=frames, file_ops=files)


Running = tuple[Allocator, ScriptedFiles, PagedTensor, PagedTensor]


@pytest.fixture
def running(make_allocator: MakeAllocator) -> Running:
    """A tensor of three pages in RAM and one on a disk that fails on demand."""
    files = ScriptedFiles()
    allocator = make_allocator(paths=2, files=files, threads=1, poison=False)
    ram = allocator.allocate("ram", 3 * PAGE // 4, torch.float32, Tier.HOST)
    return allocator, files, ram, allocator.allocate("disk", ram.numel, torch.float32, Tier.DISK)


# At the start.


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; create the folder"):
        region(tmp_path / "nowhere")


def test_a_folder_under_the_root_is_not_made() -> None:
    """It was, on the system's own disk, where a disk was not mounted."""
    path = Path("/no_such_disk_of_a_test")
    with pytest.raises(
        ConfigError, match=f"disk_path {path} does not exist, .* mount the disk, or give another disk_path"
    ):
        make_folders([path])
    assert not path.exists()
    make_folders([Path("/tmp")])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a /proc")
def test_a_file_system_without_room_for_files_is_refused_even_if_nothing_is_on_disk() -> None:
    with pytest.raises(ConfigError, match="disk_path /proc is on a file system that takes no files"):
        check_folders([Path("/proc")])


def test_a_folder_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="twice; name each once"):
        check_folders([tmp_path, tmp_path / "same"])


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        region(file)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_read_only_path_is_refused(tmp_path: Path, number: int) -> None:
    files = ScriptedFiles()
    files.open_errno = number
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written.*may write to"):
        region(tmp_path, files=files)


def test_disk_that_is_too_small_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(PageIOError, match="free some space, lower disk_memory") as caught:
        region(tmp_path, frames=2**40)
    assert (caught.value.errno, caught.value.path, caught.value.page) == (errno.ENOSPC, str(tmp_path), None)
    assert f"needs {format_bytes(2**40 * PAGE)} for pages" in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_up_while_space_is_reserved_is_refused(tmp_path: Path, number: int) -> None:
    files = ScriptedFiles()
    files.fallocate_errno = number
    with pytest.raises(PageIOError, match=f"needs {format_bytes(2 * PAGE)} for pages") as caught:
        region(tmp_path, files=files)
    assert caught.value.errno == number
    assert files.opened == files.closed, "the file of a refused disk stayed open"


def test_every_file_is_closed_when_the_second_path_is_refused(tmp_path: Path) -> None:
    files = ScriptedFiles()
    with pytest.raises(ConfigError):
        DiskRegion([tmp_path, tmp_path / "nowhere"], page_size=PAGE, total_frames=4, file_ops=files)
    assert len(files.opened) == 1
    assert files.opened == files.closed


def test_refused_disk_leaves_no_thread_or_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        Allocator(
            page_size=PAGE,
            backend=CpuBackend(),
            sizes={Tier.DEVICE: PAGE, Tier.DISK: PAGE},
            disk_paths=[tmp_path / "nowhere"],
        )
    assert set(os.listdir("/proc/self/fd")) <= before


def test_files_have_no_name_and_are_private_and_whole(tmp_path: Path) -> None:
    disk = region(tmp_path, frames=3)
    status = os.fstat(disk._files[0])
    assert os.listdir(tmp_path) == []
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 3 * PAGE
    assert status.st_blocks * 512 >= 3 * PAGE, "the space is not reserved"
    disk.close()
    disk.close()


def test_two_jobs_share_a_path(tmp_path: Path) -> None:
    first, second = region(tmp_path), region(tmp_path)
    memory = HostRegion(PAGE)
    for disk, value in ((first, 1), (second, 2)):
        memory.tensor.fill_(value)
        disk.write(0, [memory.memory])
    first.read(0, [memory.memory])
    assert memory.tensor.unique().tolist() == [1]
    first.close()
    second.close()


@pytest.mark.skipif(
    not os.path.isdir("/dev/shm") or file_system_type(Path("/dev/shm")) != "tmpfs", reason="needs a tmpfs at /dev/shm"
)
def test_tmpfs_is_allowed_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="/dev/shm is on tmpfs, which is memory") as caught:
        disk = region(Path("/dev/shm"))
    assert len(caught) == 1
    memory = HostRegion(PAGE)
    memory.tensor.fill_(7)
    disk.write(PAGE, [memory.memory])
    memory.tensor.fill_(0)
    disk.read(PAGE, [memory.memory])
    assert memory.tensor.unique().tolist() == [7]
    disk.close()


class NoDirectIo(ScriptedFiles):
    """A file system that refuses O_DIRECT, but only after it has made the file."""

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            os.close(os.open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return super().open(path, flags, mode)


def test_file_system_without_direct_io_is_allowed_with_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no O_DIRECT") as caught:
        disk = region(tmp_path, files=NoDirectIo())
    assert len(caught) == 1
    assert os.listdir(tmp_path) == []
    disk.close()


class NamesSeen(ScriptedFiles):
    """Records the folder when a file has just been opened: a kill at that moment would leave it."""

    def __init__(self, folder: Path, refused: int = 0) -> None:
        super().__init__()
        self.folder = folder
        self.refused = refused
        self.names: list[list[str]] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        if self.refused and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(self.refused, "no files without a name")
        file = super().open(path, flags, mode)
        self.names.append(os.listdir(self.folder))
        return file


def test_a_kill_at_any_moment_leaves_no_file(tmp_path: Path) -> None:
    files = NamesSeen(tmp_path)
    region(tmp_path, files=files).close()
    assert files.names == [[]]


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS])
def test_a_file_system_that_has_only_files_with_names_will_do(refused: int, tmp_path: Path) -> None:
    files = NamesSeen(tmp_path, refused)
    disk = region(tmp_path, files=files)
    assert len(files.names[-1]) == 1 and os.listdir(tmp_path) == []
    disk.close()


def test_a_name_that_cannot_be_taken_away_is_refused_and_its_file_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", unlink)
    files = NamesSeen(tmp_path, errno.EOPNOTSUPP)
    with pytest.raises(ConfigError, match="cannot be written"):
        region(tmp_path, files=files)
    assert len(files.opened) == 1 and files.opened == files.closed


def a_byte_to_each_block(fd: int, start: int, count: int) -> None:
    """Writes a byte to each block, as glibc's posix_fallocate does on a file system without fallocate(2)."""
    for position in range(start, start + count, 4096):
        os.pwrite(fd, b"\0", position + 4095)


def test_a_file_system_that_knows_no_reservation_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", a_byte_to_each_block)
    disk = region(tmp_path, frames=3)
    status = os.fstat(disk._files[0])
    assert status.st_size == 3 * PAGE and status.st_blocks * 512 >= 3 * PAGE
    if file_system_type(tmp_path) != "tmpfs":
        assert fcntl.fcntl(disk._files[0], fcntl.F_GETFL) & os.O_DIRECT
    memory = HostRegion(PAGE)
    memory.tensor.fill_(7)
    disk.write(PAGE, [memory.memory])
    memory.tensor.fill_(0)
    disk.read(PAGE, [memory.memory])
    assert memory.tensor.unique().tolist() == [7]
    disk.close()


def test_a_limit_of_the_size_of_files_is_told(tmp_path: Path) -> None:
    files = ScriptedFiles()
    files.fallocate_errno = errno.EFBIG
    with pytest.raises(PageIOError, match=r"File too large.*\(ulimit -f\), or give more paths"):
        region(tmp_path, files=files)


def test_space_comes_back_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    disk = region(tmp_path, frames=3)
    childs = os.dup(disk._files[0])  # what a worker of a data loader has
    disk.close()
    assert os.fstat(childs).st_blocks == 0
    os.close(childs)


def test_ordinary_disk_gives_no_warning(tmp_path: Path) -> None:
    if file_system_type(tmp_path) == "tmpfs":
        pytest.skip("the temporary folder is on tmpfs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region(tmp_path).close()


# In mid-run.


def test_read_error_names_path_page_and_errno(running: Running) -> None:
    allocator, files, ram, disk = running
    files.reads.append(errno.EIO)
    transfer = allocator.copy(disk, ram, numel=10)
    with pytest.raises(PageIOError, match=r"reading page 0 in .*disk0 failed: EIO.*resume from a checkpoint") as caught:
        transfer.wait()
    assert (caught.value.errno, caught.value.page) == (errno.EIO, disk.pages.spans[0].frame)
    assert caught.value.path.endswith("disk0")
    assert transfer.done()
    with pytest.raises(PageIOError):
        transfer.wait()


def test_write_error_names_path_page_and_errno(running: Running) -> None:
    allocator, files, ram, disk = running
    files.writes.append(errno.ENOSPC)
    with pytest.raises(PageIOError, match=r"writing page 1 in .*disk1") as caught:
        allocator.copy(ram, disk, source_start=PAGE // 4, target_start=PAGE // 4, numel=10).wait()
    assert (caught.value.errno, caught.value.page) == (errno.ENOSPC, 1)


@pytest.mark.parametrize("moved_bytes", [SHORT, 0])
def test_short_read_has_no_errno(running: Running, moved_bytes: int) -> None:
    allocator, files, ram, disk = running
    files.reads.append(moved_bytes)
    with pytest.raises(PageIOError, match=rf"ended after \d+ of {PAGE} bytes") as caught:
        allocator.copy(disk, ram, numel=PAGE // 4).wait()
    assert caught.value.errno is None
    assert caught.value.page == 0


def test_short_write_has_no_errno(running: Running) -> None:
    allocator, files, ram, disk = running
    files.writes.append(SHORT)
    with pytest.raises(PageIOError, match="ended after") as caught:
        allocator.copy(ram, disk).wait()
    assert caught.value.errno is None


def test_partial_transfers_are_continued_from_a_block_and_interrupts_repeated(running: Running) -> None:
    allocator, files, ram, disk = running
    values = torch.randn(ram.numel)
    ram.tensor().copy_(values)
    files.writes.extend([4096, errno.EINTR, 8192])
    allocator.copy(ram, disk).wait()
    ram.tensor().zero_()
    files.reads.extend([errno.EINTR, 16384, 4096])
    allocator.copy(disk, ram).wait()
    assert torch.equal(ram.tensor(), values)
    assert not files.reads
    assert not files.writes


def test_failed_transfer_lets_its_pages_go_and_the_disk_goes_on(running: Running) -> None:
    allocator, files, ram, disk = running
    ram.tensor().fill_(3.0)
    files.writes.append(errno.EIO)
    with pytest.raises(PageIOError):
        allocator.copy(ram, disk).wait()
    allocator.copy(ram, disk).wait()
    ram.tensor().zero_()
    allocator.copy(disk, ram).wait()
    assert ram.tensor().eq(3.0).all()
    allocator.release(disk)


def test_failed_move_leaves_the_tensor_where_it_was(running: Running) -> None:
    allocator, files, ram, _ = running
    ram.tensor().fill_(3.0)
    free = allocator.free_bytes(Tier.DISK)
    files.writes.append(errno.EIO)
    with pytest.raises(PageIOError):
        allocator.move(ram, Tier.DISK).wait()
    assert ram.tier is Tier.HOST
    assert ram.tensor().eq(3.0).all()
    assert allocator.free_bytes(Tier.DISK) == free


def test_dead_io_thread_fails_everything_and_nothing_hangs(running: Running) -> None:
    allocator, files, ram, disk = running
    files.death = SystemExit("the thread is killed")
    first = allocator.copy(disk, ram)
    with pytest.raises(InternalError, match=r"I/O thread ptm-io-.* died") as caught:
        first.wait()
    assert isinstance(caught.value.__cause__, SystemExit)
    assert caught.value.__cause__.__traceback__ is not None
    with pytest.raises(InternalError, match="died"):
        allocator.copy(ram, disk).wait()
    allocator.close()
