"""Names and attributes by path, compared with what `os` does on the host."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
from pathlib import Path
from typing import Any

import pytest

import ubtrfs

ODD_NAMES = [b"\xff\xfe", "gr\u00fcn".encode(), b"new\nline", b" space ", b"-dash", b"x" * 255, b"\x01"]


def make_tree(base: Any, join: Any, mkdir: Any, write: Any, symlink: Any) -> None:
    for top in (b"a", b"b", b"empty"):
        mkdir(join(base, top))
        if top == b"empty":
            continue
        for name in ODD_NAMES:
            write(join(base, top, name), name * 3)
        mkdir(join(base, top, b"deep"))
        write(join(base, top, b"deep", b"f"), b"x")
    symlink(b"a", join(base, b"to-a"))
    symlink(b"missing", join(base, b"nowhere"))


@pytest.mark.parametrize("topdown", [True, False])
@pytest.mark.parametrize("followlinks", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_walk_gives_what_os_walk_gives(
    fs: ubtrfs.Filesystem, tmp_path: Path, topdown: bool, followlinks: bool, text: bool
) -> None:
    host = os.fsencode(tmp_path)

    def write(path: bytes, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)

    make_tree(host, os.path.join, os.mkdir, write, os.symlink)
    make_tree(b"/", os.path.join, fs.mkdir, fs.write_bytes, fs.symlink)

    def sorted_walk(walk: Any, top: Any) -> list[Any]:
        found = []
        for path, dirs, files in walk(top, topdown=topdown, followlinks=followlinks):
            if topdown:
                dirs.sort()
            found.append((os.path.relpath(path, top), sorted(dirs), sorted(files)))
        # The order of siblings is that of the directory when it is walked bottom up.
        return found if topdown else sorted(found)

    ours: Any = "/" if text else b"/"
    assert sorted_walk(fs.walk, ours) == sorted_walk(os.walk, str(tmp_path) if text else host)


def test_bottom_up_every_directory_comes_after_its_content(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/a/b/c")
    fs.makedirs("/a/d")
    assert [path for path, _, _ in fs.walk("/", topdown=False)] == ["/a/b/c", "/a/b", "/a/d", "/a", "/"]


def test_a_walk_can_be_steered_and_reports_errors(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/a/b")
    fs.makedirs("/c/d")
    seen = []
    for top, dirs, _ in fs.walk("/"):
        seen.append(top)
        if "a" in dirs:
            dirs.remove("a")
    assert seen == ["/", "/c", "/c/d"]
    errors: list[OSError] = []
    assert list(fs.walk("/missing", onerror=errors.append)) == []
    assert errors[0].errno == errno.ENOENT and errors[0].filename == "/missing"


def test_names_are_any_bytes_and_come_back_as_they_were(fs: ubtrfs.Filesystem) -> None:
    for name in ODD_NAMES:
        fs.write_bytes(b"/" + name, name)
        assert fs.read_bytes("/" + os.fsdecode(name)) == name
        assert fs.read_bytes(pathlib.PurePosixPath("/" + os.fsdecode(name))) == name
        assert fs.path(b"/" + name).read_bytes() == name
    assert sorted(fs.listdir(b"/")) == sorted(ODD_NAMES)
    assert sorted(fs.listdir("/")) == sorted(os.fsdecode(name) for name in ODD_NAMES)
    fs.symlink(b"\xff\xfe", "/link")
    assert fs.readlink(b"/link") == b"\xff\xfe" and fs.readlink("/link") == "\udcff\udcfe"
    with pytest.raises(TypeError):
        fs.listdir(3)  # type: ignore[call-overload]


def test_names_are_made_renamed_and_removed(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/a/b")
    fs.makedirs("/a/b", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("/a/b")
    fs.makedirs("/", exist_ok=True)
    fs.mkdir("/private", 0o700)
    assert stat.S_IMODE(fs.stat("/private").st_mode) == 0o700
    fs.write_bytes("/a/f", b"text")
    fs.link("/a/f", "/a/g")
    assert fs.stat("/a/g").st_nlink == 2 and fs.stat("/a/g").st_ino == fs.stat("/a/f").st_ino
    fs.rename("/a/f", "/a/h")
    assert fs.listdir("/a") == ["b", "g", "h"]
    fs.reflink("/a/g", "/copy")
    assert fs.read_bytes("/copy") == b"text"
    fs.truncate("/copy", 2)
    assert fs.read_bytes("/copy") == b"te" and fs.read_bytes("/a/g") == b"text"
    fs.remove("/a/g")
    with pytest.raises(OSError) as caught:
        fs.rmdir("/a")
    assert caught.value.errno == errno.ENOTEMPTY
    fs.rmtree("/a")
    assert not fs.exists("/a")


def test_errors_are_oserrors_with_errno_and_say_what_and_where(fs: ubtrfs.Filesystem) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fs.open("/missing/f")
    error = caught.value
    assert (error.errno, error.filename) == (errno.ENOENT, "/missing/f")
    assert str(error) == "[Errno 2] cannot open: no such file or directory: '/missing/f'"
    fs.mkdir("/dir")
    for call, expected in [
        (lambda: fs.mkdir("/dir"), FileExistsError),
        (lambda: fs.read_bytes("/dir"), IsADirectoryError),
        (lambda: fs.listdir("/dir/x"), FileNotFoundError),
        (lambda: fs.remove("/dir"), IsADirectoryError),
        (lambda: fs.rmdir("/missing"), FileNotFoundError),
        (lambda: fs.write_bytes("/" + "x" * 256, b""), OSError),
        (lambda: fs.getxattr("/dir", "user.none"), OSError),
        (lambda: ubtrfs.open("/nonexistent/disk.img"), FileNotFoundError),
        (lambda: ubtrfs.open(3), TypeError),
        (lambda: ubtrfs.make_in_memory(1 << 20), OSError),
    ]:
        with pytest.raises(expected):
            call()  # type: ignore[no-untyped-call]


def test_attributes_are_set(fs: ubtrfs.Filesystem) -> None:
    fs.write_bytes("/f", b"12345")
    fs.symlink("f", "/link")
    fs.chown("/f", 1000, 100)
    fs.chown("/f", -1, 200)
    fs.chown("/link", 7, 8, follow_symlinks=False)
    fs.chmod("/link", 0o4750)
    fs.utime("/f", ns=(1, -2), created_ns=3)
    status = fs.stat("/link")
    assert (status.st_uid, status.st_gid, status.st_size, status.st_nlink) == (1000, 200, 5, 1)
    assert status.st_mode == stat.S_IFREG | 0o4750
    assert (status.st_atime_ns, status.st_mtime_ns, status.st_birthtime_ns) == (1, -2, 3)
    link = fs.lstat("/link")
    assert stat.S_ISLNK(link.st_mode) and (link.st_uid, link.st_gid) == (7, 8)
    fs.utime("/f")
    assert fs.stat("/f").st_mtime > 1_500_000_000
    with pytest.raises(ValueError):
        fs.utime("/f", (1, 2), ns=(1, 2))
    fs.setxattr("/f", "user.color", b"blue")
    fs.setxattr("/f", b"user.\xff", b"")
    assert sorted(fs.listxattr("/f")) == ["user.color", "user.\udcff"]
    assert fs.getxattr("/f", "user.color") == b"blue"
    fs.removexattr("/f", "user.color")
    with pytest.raises(OSError) as caught:
        fs.getxattr("/f", "user.color")
    assert caught.value.errno == errno.ENODATA


def test_entries_tell_their_kind(fs: ubtrfs.Filesystem) -> None:
    fs.write_bytes("/f", b"123")
    fs.mkdir("/d")
    fs.create_subvolume("/s")
    fs.symlink("d", "/to-d")
    fs.symlink("f", "/to-f")
    fs.symlink("none", "/to-none")
    entries = {entry.name: entry for entry in fs.scandir("/")}
    assert {name for name, entry in entries.items() if entry.is_dir()} == {"d", "s", "to-d"}
    assert {name for name, entry in entries.items() if entry.is_dir(follow_symlinks=False)} == {"d", "s"}
    assert {name for name, entry in entries.items() if entry.is_file()} == {"f", "to-f"}
    assert {name for name, entry in entries.items() if entry.is_symlink()} == {"to-d", "to-f", "to-none"}
    assert {name for name, entry in entries.items() if entry.is_subvolume()} == {"s"}
    assert entries["f"].stat().st_size == 3 and entries["f"].inode() == fs.stat("/f").st_ino
    assert os.fspath(entries["f"]) == "/f" and [entry.path for entry in fs.scandir(b"/d")] == []


def test_paths_work_as_in_pathlib(fs: ubtrfs.Filesystem) -> None:
    root = fs.path()
    app = root / "etc" / "app"
    app.mkdir(parents=True)
    app.mkdir(exist_ok=True)
    with pytest.raises(FileExistsError):
        app.mkdir()
    config = app / "config.tar.gz"
    assert config.write_text("grün\n", encoding="utf-8") == 5
    assert config.read_text(encoding="utf-8") == "grün\n" and config.write_bytes(bytearray(b"x")) == 1
    assert (config.name, config.stem, config.suffix, config.suffixes) == ("config.tar.gz", "config.tar", ".gz", [".tar", ".gz"])
    assert config.parent == app and config.parents[-1] == root and config.parts == ("/", "etc", "app", "config.tar.gz")
    assert str(config.relative_to(app)) == "config.tar.gz" and config.is_relative_to(root) and config.match("*.gz")
    assert config.with_suffix(".xz").name == "config.tar.xz" and config.with_name("x") == app / "x"
    (app / "link").symlink_to("config.tar.gz")
    assert (app / "link").is_symlink() and (app / "link").samefile(config) and str((app / "link").readlink()) == "config.tar.gz"
    (app / "hard").hardlink_to(config)
    assert config.stat().st_nlink == 2 and config.lstat().st_nlink == 2
    (app / "sub" / "x.gz").parent.mkdir()
    (app / "sub" / "x.gz").touch()
    assert sorted(map(str, root.glob("etc/*/*.gz"))) == ["/etc/app/config.tar.gz"]
    assert sorted(map(str, root.rglob("*.gz"))) == ["/etc/app/config.tar.gz", "/etc/app/sub/x.gz"]
    assert sorted(map(str, app.glob("**"))) == ["/etc/app", "/etc/app/sub"]
    assert sorted(path.name for path in app.iterdir()) == ["config.tar.gz", "hard", "link", "sub"]
    assert [str(top) for top, _, _ in app.walk()] == ["/etc/app", "/etc/app/sub"]
    moved = config.rename(root / "moved")
    assert moved.exists() and not config.exists() and not (app / "link").exists()
    assert (app / "link").exists(follow_symlinks=False)
    moved.chmod(0o600)
    moved.unlink()
    moved.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        moved.unlink()
    (app / "sub" / "x.gz").unlink()
    (app / "sub").rmdir()
    fs.create_subvolume(root / "s")
    assert (root / "s").is_subvolume() and (root / "s").is_dir() and not app.is_subvolume()
    assert {root / "a", root / "a"} == {root / "a"} and root / "a" < root / "b" and root / "a" != "/a"
    assert repr(app) == "ubtrfs.Path('/etc/app')" and bytes(fs.path(b"/\xff")) == b"/\xff"


def test_links_that_lead_nowhere_hide_nothing_else(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/d/sub")
    fs.write_bytes("/d/sub/f", b"1")
    fs.write_bytes("/d/file", b"1")
    links = {"loop": "loop", "through": "file/x", "long": "x" * 300, "dangling": "nothing"}
    for name, target in links.items():
        fs.symlink(target, f"/d/{name}")
    assert list(fs.walk("/d")) == [("/d", ["sub"], ["file", *links]), ("/d/sub", [], ["f"])]
    for name in links:
        path = f"/d/{name}"
        assert not (fs.exists(path) or fs.isdir(path) or fs.isfile(path)) and fs.islink(path) and fs.lexists(path)
        assert not (fs.path(path).is_dir() or fs.path(path).exists())
    assert not any(entry.is_file() for entry in fs.scandir("/d") if entry.is_symlink())


def test_a_file_is_no_copy_of_itself(fs: ubtrfs.Filesystem) -> None:
    fs.write_bytes("/f", b"precious")
    fs.link("/f", "/hard")
    fs.symlink("f", "/soft")
    for target in ("/f", "/hard", "/soft", "/./f"):
        with pytest.raises(OSError, match="the source itself"):
            fs.reflink("/f", target)
        assert fs.read_bytes("/f") == b"precious"


def test_the_root_directory_is_not_removed(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/a/b")
    fs.write_bytes("/a/b/f", b"precious")
    fs.create_subvolume("/sub")
    fs.symlink("/", "/link")
    for path in ("/", "//", ".", "/a/..", "", b"/", fs.path("/")):
        with pytest.raises(OSError, match="root directory") as caught:
            fs.rmtree(path)
        assert caught.value.errno == errno.EBUSY
    for path in ("/a/.", "/a/b/.."):
        with pytest.raises(OSError, match="give its name"):
            fs.rmtree(path)
    with pytest.raises(NotADirectoryError):
        fs.rmtree("/link")
    assert fs.read_bytes("/a/b/f") == b"precious"
    fs.rmtree("/a/")
    fs.rmtree("/sub")
    assert fs.listdir("/") == ["link"]


def test_special_files_are_made_as_by_os(fs: ubtrfs.Filesystem) -> None:
    kinds = {"/file": 0o640, "/regular": stat.S_IFREG | 0o600, "/socket": stat.S_IFSOCK | 0o755}
    for path, mode in kinds.items():
        fs.mknod(path, mode)
        assert fs.stat(path).st_mode == (mode if stat.S_IFMT(mode) else mode | stat.S_IFREG)
    fs.mknod("/disk", stat.S_IFBLK | 0o660, os.makedev(259, 70000))
    assert fs.stat("/disk").device_number == (259, 70000)
    fs.mkfifo("/pipe")
    fs.mkfifo("/private", 0o600)
    assert [stat.filemode(fs.stat(path).st_mode) for path in ("/pipe", "/private")] == ["prw-r--r--", "prw-------"]
    with pytest.raises(FileExistsError):
        fs.mkfifo("/file")
    with pytest.raises(FileExistsError):
        fs.mknod("/file")
    with pytest.raises(OSError) as caught:
        fs.mknod("/dir", stat.S_IFDIR | 0o755)
    assert caught.value.errno == errno.EINVAL
    for call in (fs.open, fs.read_bytes):
        with pytest.raises(OSError):
            call("/pipe")


def test_statvfs_has_the_fields_of_os(image: str) -> None:
    with ubtrfs.make(image, size=256 << 20) as fs:
        fs.write_bytes("/f", bytes(1 << 20))
        fs.sync()
        ours, usage = fs.statvfs("/f"), fs.usage()
        assert isinstance(ours, os.statvfs_result)
        assert ours.f_blocks * ours.f_frsize == usage.total and ours.f_bavail * ours.f_bsize == usage.available
        assert ours.f_bfree <= ours.f_blocks and ours.f_namemax == 255 and ours.f_flag == 0 and ours.f_fsid != 0
        with pytest.raises(FileNotFoundError):
            fs.statvfs("/missing")
    with ubtrfs.open(image, read_only=True) as fs:
        assert fs.statvfs().f_flag == os.ST_RDONLY
