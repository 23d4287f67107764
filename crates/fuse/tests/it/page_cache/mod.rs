//! Tests of data that is in the kernel's page cache while the file changes in other ways: the data is written back and
//! visible to all calls, and failures are reported.
//!
//! Method: this process serves a mount, and programs in other processes use it. Linux's own btrfs serves as the
//! reference: the same program runs on a loop mount.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;

use tempfile::TempDir;
use ubtrfs_control::Channel;
use ubtrfs_device::Device;
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::{MountConfig, MountError, Session};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    FaultDevice, FaultPlan, Image, LoopMount, Medium, MediumDevice, btrfs_check, capability, check_medium,
};

struct Mount {
    below: Arc<MediumDevice>,
    dir: TempDir,
    server: JoinHandle<Result<(), MountError>>,
}

impl Mount {
    fn new(medium: Medium, writeback_cache: bool) -> Self {
        let below = Arc::new(MediumDevice::new(medium));
        Self::on(below.clone(), below, writeback_cache)
    }

    fn on(below: Arc<MediumDevice>, device: Arc<dyn Device>, writeback_cache: bool) -> Self {
        Self::with(below, device, &MountConfig { writeback_cache, ..MountConfig::default() })
    }

    /// A mount that all users may enter.
    fn for_all_users(medium: Medium) -> Self {
        let below = Arc::new(MediumDevice::new(medium));
        let config = MountConfig { allow_other: true, default_permissions: true, ..MountConfig::default() };
        Self::with(below.clone(), below, &config)
    }

    fn with(below: Arc<MediumDevice>, device: Arc<dyn Device>, config: &MountConfig) -> Self {
        let options = MountOptions { track_lookups: true, ..MountOptions::parse("commit=300").unwrap() };
        let fs = Fs::open(vec![device], options).unwrap();
        let dir = TempDir::with_prefix("ubtrfs-page-cache-").unwrap();
        let session = Session::mount(fs, dir.path(), config).unwrap();
        Self { below, dir, server: std::thread::spawn(move || session.run()) }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn unmount(self) -> Medium {
        ubtrfs_fuse::unmount(self.dir.path(), false).unwrap();
        self.server.join().unwrap().unwrap();
        self.below.content()
    }

    /// Unmounts, which must report that pages of this file found no space.
    fn unmount_with_lost_pages(self, file: &str) -> Medium {
        let unmounted = ubtrfs_fuse::unmount(self.dir.path(), false);
        for error in [unmounted.unwrap_err(), self.server.join().unwrap().unwrap_err()] {
            let said = error.to_string();
            assert!(said.contains(&format!("pages of '/{file}'")) && said.contains("No space left"), "{said}");
        }
        self.below.content()
    }
}

fn fresh(len_bytes: u64) -> Medium {
    Medium::formatted(len_bytes, &MkfsOptions::default()).unwrap()
}

/// Runs a Python program in a directory and returns its output.
fn python(dir: &Path, program: &str) -> String {
    let output = Command::new("python3").args(["-c", program]).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn shell(dir: &Path, script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{script}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn first_word(line: &str) -> &str {
    line.split(' ').next().unwrap_or_default()
}

fn can_run() -> bool {
    capability::fuse() && capability::program("python3")
}

fn judge(medium: &Medium) {
    check_medium(medium).unwrap();
    if capability::kernel_oracle() {
        let image = Image::empty(0).unwrap();
        medium.save(image.path()).unwrap();
        btrfs_check(image.path()).unwrap();
    }
}

/// On its own filesystems, Linux refuses to clear O_APPEND of an append-only file with `F_SETFL`. On a FUSE mount, the
/// kernel does not know that the file is append-only, and clears the flag. So the server refuses the write.
#[test]
fn an_append_only_file_is_not_overwritten_once_its_append_flag_is_gone() {
    if !can_run() {
        return;
    }
    for writeback_cache in [false, true] {
        let mount = Mount::new(fresh(256 << 20), writeback_cache);
        shell(mount.path(), "printf 'original line\n' >log && chattr +a log");
        let program = "import os, fcntl
fd = os.open('log', os.O_WRONLY | os.O_APPEND)
os.write(fd, b'appended\\n')
try:
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    os.pwrite(fd, b'TAMPERED', 0)
    print('overwritten')
except PermissionError:
    print('refused')
os.fsync(fd)
os.close(fd)
print(open('log').read(), end='')";
        assert_eq!(python(mount.path(), program), "refused\noriginal line\nappended\n");
        judge(&mount.unmount());
    }
}

#[test]
fn flags_times_and_blocks_are_as_on_linux() {
    if !can_run() || !capability::kernel_oracle() {
        return;
    }
    let program = include_str!("as_linux.py");
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let expected = python(linux.path(), program);
    linux.close().unwrap();
    for writeback_cache in [false, true] {
        let mount = Mount::new(fresh(256 << 20), writeback_cache);
        let found = python(mount.path(), program);
        judge(&mount.unmount());
        let lines = expected.lines().zip(found.lines());
        // With its writeback cache, the kernel keeps the times and sets them for every fallocate, so lines that begin
        // with `data`, `hole` or `whole` may differ.
        let is_the_kernels = |line: &str| writeback_cache && ["data", "hole", "whole"].contains(&first_word(line));
        let different: Vec<_> = lines.filter(|(linux, ours)| linux != ours && !is_the_kernels(linux)).collect();
        assert!(expected.lines().count() > 200 && expected.lines().count() == found.lines().count());
        assert!(different.is_empty(), "writeback_cache {writeback_cache}, Linux and ours:\n{different:#?}");
    }
}

/// Runs a part of `privileges.py` on Linux's btrfs and on a mount, and returns the lines that differ: Linux's and ours.
fn differences(part: &str) -> Vec<(String, String)> {
    if !can_run() || !capability::kernel_oracle() {
        return Vec::new();
    }
    let program = format!("part = '{part}'\n{}", include_str!("privileges.py"));
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let expected = python(linux.path(), &program);
    linux.close().unwrap();
    let mount = Mount::for_all_users(fresh(256 << 20));
    let found = python(mount.path(), &program);
    judge(&mount.unmount());
    assert!(expected.lines().count() > 3 && expected.lines().count() == found.lines().count(), "{expected}\n{found}");
    let lines = expected.lines().map(str::to_owned).zip(found.lines().map(str::to_owned));
    lines.filter(|(linux, ours)| linux != ours).collect()
}

#[test]
fn a_stub_directory_has_the_owner_of_the_directory_above() {
    assert_eq!(differences("stub"), []);
}

#[test]
fn root_keeps_set_id_bits_of_a_file_whose_capabilities_a_write_removes() {
    assert_eq!(differences("capabilities"), []);
}

#[test]
fn fallocate_by_another_user_clears_set_id_bits_only_if_the_file_changes() {
    assert_eq!(differences("fallocate"), []);
}

#[test]
fn fssetxattr_keeps_the_compression_property() {
    assert_eq!(differences("compression"), []);
}

#[test]
fn deletion_of_the_name_dot_is_refused_with_the_error_of_linux() {
    assert_eq!(differences("dot"), []);
}

#[test]
fn pages_that_were_dirty_before_a_flag_are_written() {
    if !can_run() {
        return;
    }
    const PROGRAM: &str = r"
import errno, fcntl, mmap, os, struct
maps = []
def dirty(name):
    fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, 65536)
    mapped = mmap.mmap(fd, 65536)
    for at in range(0, 65536, 4096):
        mapped[at] = 7
    maps.append((fd, mapped))
for name, flag in ('immutable', 0x10), ('append', 0x20):
    dirty(name)
    fcntl.ioctl(maps[-1][0], 0x40086602, struct.pack('<Q', flag))
args = bytearray(4096)
args[8:17] = b'subvolume'
root = os.open('.', os.O_RDONLY)
fcntl.ioctl(root, 0x5000940e, args)
dirty('subvolume/file')
directory = os.open('subvolume', os.O_RDONLY)
fcntl.ioctl(directory, 0x4008941a, struct.pack('<Q', 2))
try:
    os.open('subvolume/new', os.O_WRONLY | os.O_CREAT)
    print('writable')
except OSError as error:
    assert error.errno == errno.EROFS
for fd, mapped in maps:
    mapped.flush()
    os.fsync(fd)
";
    for writeback_cache in [false, true] {
        let mount = Mount::new(fresh(256 << 20), writeback_cache);
        assert_eq!(python(mount.path(), PROGRAM), "");
        let medium = mount.unmount();
        judge(&medium);
        let options = MountOptions::parse("ro").unwrap();
        let fs = Fs::open(vec![Arc::new(MediumDevice::new(medium))], options).unwrap();
        for name in ["immutable", "append", "subvolume/file"] {
            let found = fs.lookup_path(name.as_bytes(), true).unwrap();
            let content = fs.read(found.id, 0, 1 << 20).unwrap();
            assert_eq!(content.len(), 65536, "{name}");
            assert!(content.chunks(4096).all(|page| page[0] == 7), "{name} lost pages, {writeback_cache}");
        }
        fs.close().unwrap();
    }
}

#[test]
fn tar_and_cp_find_the_data_of_sparse_files_that_waits() {
    if !can_run() || !capability::program("tar") {
        return;
    }
    const COPY: &str = "tar cSf ../A f; mkdir -p ../X; tar xSf ../A -C ../X; cmp f ../X/f; cp --sparse=auto f ../C; cmp f ../C; rm -r ../X ../A ../C";
    // While tar and cp read the file, its writer holds it open, with data in the kernel's page cache or in a mapping.
    const OPEN: &str = r"
import mmap, os, subprocess, sys
how, copy = sys.argv[1:]
fd = os.open('f', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
if how == 'new':
    os.write(fd, b'hello' * 3000)
elif how == 'stat':
    os.stat('f'); os.write(fd, b'hello'); os.stat('f')
else:
    os.ftruncate(fd, 10 << 20)
    os.stat('f')
    if how == 'hole':
        os.pwrite(fd, b'hello', 5 << 20)
    else:
        mapped = mmap.mmap(fd, 10 << 20)
        mapped[5 << 20] = 7
subprocess.run(['sh', '-ec', copy], check=True)
";
    for writeback_cache in [false, true] {
        let mount = Mount::new(fresh(256 << 20), writeback_cache);
        let dir = mount.path().join("dir");
        std::fs::create_dir(&dir).unwrap();
        let outside = TempDir::with_prefix("ubtrfs-copies-").unwrap();
        let copy = COPY.replace("..", &outside.path().display().to_string());
        shell(
            &dir,
            &format!("truncate -s 10M f; printf hello | dd of=f bs=1 seek=5M conv=notrunc status=none; {copy}"),
        );
        for how in ["new", "stat", "hole", "mapped"] {
            let output = Command::new("python3").args(["-c", OPEN, how, &copy]).current_dir(&dir).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "writeback_cache {writeback_cache}, {how}: {stderr}");
        }
        judge(&mount.unmount());
    }
}

#[test]
fn times_are_the_same_after_mounting_again() {
    if !can_run() {
        return;
    }
    const PROGRAM: &str = r"
import os, time
os.makedirs('d', exist_ok=True)
for nr in range(40):
    with open('d/%d' % nr, 'wb') as file:
        file.write(b'x' * (1000 * nr + 1))
        if nr % 3 == 0: os.fsync(file.fileno())
        if nr % 5 == 0: time.sleep(0.05)
        if nr % 4 == 0: file.write(b'y' * 9000)
os.chmod('d/1', 0o600)
os.truncate('d/2', 10)
os.utime('d/3', (5, 5))
os.link('d/4', 'd/link')
os.rename('d/6', 'd/renamed')
os.setxattr('d/7', 'user.x', b'1')
";
    const SHOW: &str =
        "import os\nfor n in sorted(os.listdir('d')):\n  s = os.stat('d/' + n); print(n, s.st_mtime_ns, s.st_ctime_ns)";
    for writeback_cache in [false, true] {
        let mount = Mount::new(fresh(256 << 20), writeback_cache);
        python(mount.path(), PROGRAM);
        let before = python(mount.path(), SHOW);
        let medium = mount.unmount();
        let mount = Mount::new(medium, writeback_cache);
        let after = python(mount.path(), SHOW);
        judge(&mount.unmount());
        let different: Vec<_> = before.lines().zip(after.lines()).filter(|(before, after)| before != after).collect();
        assert!(different.is_empty(), "writeback_cache {writeback_cache}: {different:#?}");
    }
}

/// A full filesystem cannot store the pages of a mapping, but sync commits everything else.
#[test]
fn sync_commits_after_an_error_of_a_mapping() {
    if !can_run() {
        return;
    }
    const PROGRAM: &str = r"
import errno, mmap, os
hole = os.open('hole', os.O_RDWR | os.O_CREAT)
os.ftruncate(hole, 32 << 20)
mapped = mmap.mmap(hole, 32 << 20)
small = os.open('small', os.O_RDWR | os.O_CREAT)
os.write(small, b'small')
full = os.open('full', os.O_RDWR | os.O_CREAT)
try:
    while True: os.write(full, b'f' * (1 << 20))
except OSError as error:
    assert error.errno == errno.ENOSPC
os.close(full)
for at in range(0, 32 << 20, 4096):
    mapped[at] = 7
try:
    mapped.flush()
    print('flushed')
except OSError as error:
    print(errno.errorcode[error.errno])
os.rename('small', 'renamed')
os._exit(0)
";
    let mount = Mount::new(fresh(128 << 20), false);
    assert_eq!(python(mount.path(), PROGRAM), "ENOSPC\n");
    let synced = Channel::mount(mount.path()).unwrap().sync();
    let options = MountOptions::parse("ro,nologreplay").unwrap();
    let committed = Fs::open(vec![Arc::new(MediumDevice::new(mount.below.content()))], options).unwrap();
    let small = committed.lookup(committed.root(), b"renamed");
    assert!(small.is_ok_and(|small| small.size == 5), "nothing was committed; sync said {synced:?}");
    committed.close().unwrap();
    judge(&mount.unmount_with_lost_pages("hole"));
}

#[test]
fn each_open_file_hears_of_a_failed_writeback_once() {
    if !can_run() {
        return;
    }
    const PROGRAM: &str = r"
import errno, os
first, second = (os.open('file', os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
other = os.open('other', os.O_RDWR | os.O_CREAT)
def synced(fd):
    try:
        os.fsync(fd)
        return 0
    except OSError as error:
        return errno.errorcode[error.errno]
os.write(first, b'never on a disk!' + b'x' * 9000)
os.write(other, b'x' * 9000)
print(synced(first), synced(first), synced(other))
os.pwrite(first, b'y' * 9016, 0)
print(synced(first), synced(second), synced(second), synced(first))
late = os.open('file', os.O_RDONLY)
print(synced(late))
";
    let below = Arc::new(MediumDevice::new(fresh(256 << 20)));
    let plan = FaultPlan { refused: Some(*b"never on a disk!"), ..FaultPlan::default() };
    let device = Arc::new(FaultDevice::new(below.clone(), plan));
    let mount = Mount::on(below, device, false);
    assert_eq!(python(mount.path(), PROGRAM), "EIO EIO 0\n0 EIO 0 0\n0\n");
    judge(&mount.unmount());
}
