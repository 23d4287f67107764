//! Limits of quota groups: which operations are refused at which limit, and that no counted number exceeds a limit.
//!
//! Method: one table of operations runs on Linux's mount and on the engine. Each operation gets a new subvolume whose
//! limit leaves room for a known number of tree blocks. Other tests write, preallocate and share until a limit is
//! reached, and compare the counted bytes with it.

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::quota_rounds::{ROOT, TOP, open, settle};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use ubtrfs_fs::{FallocateMode, Fs, InodeId, NewInode, QgroupId, QuotaKind, RenameFlags, SetAttr, SetTime, XattrFlags};
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability, check_quotas, run};

const NODESIZE: u64 = 16 << 10;
const SECTORSIZE: u64 = 4 << 10;
const EDQUOT: i32 = rustix::io::Errno::DQUOT.raw_os_error();
const PUNCH: FallocateMode = FallocateMode::PUNCH_HOLE.union(FallocateMode::KEEP_SIZE);

/// An operation in a subvolume that has the files `f`, `g` and `d/f`, each of a few bytes; `big`, of 1 MiB; `nocow`, of
/// 256 KiB; `prealloc`, of 1 MiB without data; and the empty directories `e` and `d/e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Create,
    Mkdir,
    Mknod,
    Symlink,
    Tmpfile,
    /// A second name, in another directory.
    Link,
    /// A rename from the first name to the second.
    Rename(&'static str, &'static str),
    Exchange(&'static str, &'static str),
    Whiteout(&'static str, &'static str),
    Setxattr(&'static str),
    Removexattr,
    Chmod,
    Utimes,
    SetFlags,
    Subvolume,
    SnapshotInside,
    SnapshotOutside,
    SnapshotOfAnother,
    WriteNew,
    WriteInPlace,
    WritePreallocated,
    Truncate(u64),
    Punch,
    Unlink,
    Rmdir,
}

/// Each operation, with the room in tree blocks that Linux needs below the limit, and the room that ubtrfs needs. 0: the
/// operation succeeds even far over the limit.
const TABLE: &[(Operation, i64, i64)] = {
    use Operation::*;
    &[
        (Create, 5, 5),
        (Mkdir, 5, 5),
        (Mknod, 5, 5),
        (Symlink, 6, 6),
        (Tmpfile, 3, 3),
        (Link, 5, 5),
        (Rename("f", "new"), 8, 8),
        (Rename("f", "d/new"), 9, 9),
        (Rename("f", "g"), 13, 13),
        (Rename("f", "d/f"), 14, 14),
        (Rename("e", "new"), 8, 8),
        (Rename("e", "d/new"), 9, 9),
        (Rename("e", "d/e"), 14, 14),
        (Exchange("f", "g"), 15, 15),
        (Exchange("f", "d/f"), 16, 16),
        (Exchange("e", "d/e"), 16, 16),
        (Whiteout("f", "new"), 12, 12),
        (Whiteout("f", "d/new"), 13, 13),
        (Whiteout("f", "g"), 17, 17),
        (Setxattr("user.new"), 2, 2),
        (Setxattr("user.old"), 2, 2),
        (Chmod, 1, 1),
        (Utimes, 1, 1),
        (SetFlags, 3, 3),
        (Subvolume, 3, 3),
        (SnapshotInside, 3, 3),
        (SnapshotOfAnother, 3, 3),
        (SnapshotOutside, 0, 0),
        // A write needs room for its data too.
        (WriteNew, 2, 2),
        // Linux also reserves room for the data at first, although it takes none.
        (WritePreallocated, 2, 1),
        // These changes free space, or need none. ubtrfs always allows them, so that a user at a limit can go on.
        (WriteInPlace, 2, 0),
        (Removexattr, 2, 0),
        (Truncate(0), 2, 0),
        (Truncate(10 * SECTORSIZE), 2, 0),
        (Punch, 2, 0),
        (Unlink, 0, 0),
        (Rmdir, 0, 0),
    ]
};

/// A filesystem on which the table runs.
trait Side {
    /// Makes a subvolume for an operation, with this number in its name, and commits.
    fn prepare(&mut self, nr: usize);
    /// Sets the limit of the referenced bytes so that `room` bytes are left.
    fn limit(&mut self, room: i64);
    /// Returns the error number of the operation, or 0.
    fn perform(&mut self, operation: Operation) -> i32;
}

/// Whether both sides need at least as many tree blocks of room as the table says, and not more.
fn run_table(side: &mut dyn Side, blocks_of: impl Fn(&(Operation, i64, i64)) -> i64) {
    let mut nr = 0;
    let mut wrong = Vec::new();
    for row in TABLE {
        let need = blocks_of(row);
        let rooms = if need > 0 { vec![need - 1, need] } else { vec![-3] };
        for room in rooms {
            nr += 1;
            side.prepare(nr);
            side.limit(room * NODESIZE as i64);
            let expected = if room < need && need > 0 { EDQUOT } else { 0 };
            let found = side.perform(row.0);
            if found != expected {
                wrong.push(format!("{:?} with room for {room} blocks: {found}, not {expected}", row.0));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Linux's mount, with the directory of the current subvolume and its number.
struct Linux {
    mount: LoopMount,
    dir: PathBuf,
    id: u64,
}

impl Linux {
    fn btrfs(&self, args: &[&str]) -> String {
        run("btrfs", args).unwrap()
    }

    fn sync(&self) {
        self.btrfs(&["filesystem", "sync", &self.mount.path().to_string_lossy()]);
    }

    /// Runs a command of btrfs-progs, whose messages name the error.
    fn command(&self, args: &[&str]) -> io::Result<()> {
        let output = std::process::Command::new("btrfs").args(args).env("LC_ALL", "C").output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(()),
            false if text.contains("quota exceeded") => Err(io::Error::from_raw_os_error(EDQUOT)),
            false => Err(io::Error::other(text)),
        }
    }

    fn try_perform(&self, operation: Operation) -> io::Result<()> {
        let at = |name: &str| self.dir.join(name);
        let path = |name: &str| at(name).to_string_lossy().into_owned();
        let renamed = |from: &str, to: &str, flags| {
            Ok(rustix::fs::renameat_with(rustix::fs::CWD, at(from), rustix::fs::CWD, at(to), flags)?)
        };
        let writable = |name: &str| std::fs::OpenOptions::new().write(true).open(at(name));
        match operation {
            Operation::Create => std::fs::File::create_new(at("new")).map(drop),
            Operation::Mkdir => std::fs::create_dir(at("new")),
            Operation::Mknod => {
                let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
                Ok(rustix::fs::mknodat(rustix::fs::CWD, at("new"), kind, mode, 0)?)
            }
            Operation::Symlink => symlink("target", at("new")),
            Operation::Tmpfile => {
                let flags = rustix::fs::OFlags::TMPFILE.bits() as i32;
                std::fs::OpenOptions::new().write(true).custom_flags(flags).open(&self.dir).map(drop)
            }
            Operation::Link => std::fs::hard_link(at("f"), at("d/new")),
            Operation::Rename(from, to) => std::fs::rename(at(from), at(to)),
            Operation::Exchange(from, to) => renamed(from, to, rustix::fs::RenameFlags::EXCHANGE),
            Operation::Whiteout(from, to) => renamed(from, to, rustix::fs::RenameFlags::WHITEOUT),
            Operation::Setxattr(name) => {
                Ok(rustix::fs::setxattr(at("f"), name, b"value", rustix::fs::XattrFlags::empty())?)
            }
            Operation::Removexattr => Ok(rustix::fs::removexattr(at("f"), "user.old")?),
            Operation::Chmod => std::fs::set_permissions(at("f"), std::fs::Permissions::from_mode(0o600)),
            Operation::Utimes => std::fs::File::open(at("f"))?.set_modified(std::time::UNIX_EPOCH),
            Operation::SetFlags => {
                let file = std::fs::File::open(at("f"))?;
                Ok(ioctl_setflags(&file, ioctl_getflags(&file)? | IFlags::NODUMP)?)
            }
            Operation::Subvolume => self.command(&["subvolume", "create", &path("new")]),
            Operation::SnapshotInside => self.command(&["subvolume", "snapshot", &path(""), &path("new")]),
            Operation::SnapshotOutside => {
                let to = self.mount.join(format!("snapshot-of-{}", self.id));
                self.command(&["subvolume", "snapshot", &path(""), &to.to_string_lossy()])
            }
            Operation::SnapshotOfAnother => {
                self.command(&["subvolume", "snapshot", &self.mount.join("other").to_string_lossy(), &path("new")])
            }
            Operation::WriteNew => writable("g")?.write_all_at(&[1; SECTORSIZE as usize], 0),
            Operation::WriteInPlace => writable("nocow")?.write_all_at(&[1; SECTORSIZE as usize], 0),
            Operation::WritePreallocated => {
                writable("prealloc")?.write_all_at(&[1; SECTORSIZE as usize], 8 * SECTORSIZE)
            }
            Operation::Truncate(size) => writable("big")?.set_len(size),
            Operation::Punch => {
                let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                Ok(rustix::fs::fallocate(writable("big")?, flags, 2 * SECTORSIZE, SECTORSIZE)?)
            }
            Operation::Unlink => std::fs::remove_file(at("f")),
            Operation::Rmdir => std::fs::remove_dir(at("e")),
        }
    }
}

impl Side for Linux {
    fn prepare(&mut self, nr: usize) {
        self.dir = self.mount.join(format!("s{nr}"));
        self.btrfs(&["subvolume", "create", &self.dir.to_string_lossy()]);
        for dir in ["d", "e", "d/e"] {
            std::fs::create_dir(self.dir.join(dir)).unwrap();
        }
        for file in ["f", "g", "d/f", "nocow"] {
            std::fs::write(self.dir.join(file), if file == "nocow" { "" } else { "few" }).unwrap();
        }
        rustix::fs::setxattr(self.dir.join("f"), "user.old", b"old", rustix::fs::XattrFlags::empty()).unwrap();
        std::fs::write(self.dir.join("big"), Rng::new(1).bytes(1 << 20)).unwrap();
        let nocow = std::fs::OpenOptions::new().write(true).open(self.dir.join("nocow")).unwrap();
        ioctl_setflags(&nocow, ioctl_getflags(&nocow).unwrap() | IFlags::NOCOW).unwrap();
        nocow.write_all_at(&[7; 256 << 10], 0).unwrap();
        let prealloc = std::fs::File::create(self.dir.join("prealloc")).unwrap();
        rustix::fs::fallocate(&prealloc, rustix::fs::FallocateFlags::empty(), 0, 1 << 20).unwrap();
        self.sync();
        self.id = id_of(&self.dir);
    }

    fn limit(&mut self, room: i64) {
        let (numbers, _) = self.mount.quota_numbers().unwrap().unwrap();
        let group = format!("0/{}", self.id);
        let limit = numbers[&group].0.checked_add_signed(room).unwrap();
        self.btrfs(&["qgroup", "limit", &limit.to_string(), &group, &self.mount.path().to_string_lossy()]);
    }

    fn perform(&mut self, operation: Operation) -> i32 {
        errno_of(self.try_perform(operation), operation)
    }
}

fn errno_of(result: io::Result<()>, operation: Operation) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or_else(|| panic!("{operation:?}: {error}")),
    }
}

fn id_of(subvolume: &Path) -> u64 {
    assert_eq!(std::fs::metadata(subvolume).unwrap().ino(), 256);
    run("btrfs", ["inspect-internal", "rootid", &subvolume.to_string_lossy()]).unwrap().trim().parse().unwrap()
}

/// The engine, with the root directories of the current and of another subvolume.
struct Engine {
    fs: Arc<Fs>,
    dir: InodeId,
    other: InodeId,
}

impl Engine {
    fn find(&self, path: &str) -> InodeId {
        path.split('/').fold(self.dir, |dir, name| self.fs.lookup(dir, name.as_bytes()).unwrap().id)
    }

    fn parent<'n>(&self, path: &'n str) -> (InodeId, &'n [u8]) {
        match path.split_once('/') {
            Some((dir, name)) => (self.find(dir), name.as_bytes()),
            None => (self.dir, path.as_bytes()),
        }
    }

    fn create(&self, path: &str, new: NewInode<'_>) -> ubtrfs_fs::Result<InodeId> {
        let (dir, name) = self.parent(path);
        Ok(self.fs.create(dir, name, new, &ROOT)?.id)
    }

    fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> ubtrfs_fs::Result<()> {
        let ((dir, name), (new_dir, new_name)) = (self.parent(from), self.parent(to));
        self.fs.rename(dir, name, new_dir, new_name, flags)
    }

    fn try_perform(&self, operation: Operation) -> ubtrfs_fs::Result<()> {
        let fs = &self.fs;
        let set = |name: &str, set: SetAttr| fs.setattr(self.find(name), &set, &ROOT).map(drop);
        let sector = [1; SECTORSIZE as usize];
        match operation {
            Operation::Create => self.create("new", NewInode::file(0o644)).map(drop),
            Operation::Mkdir => self.create("new", NewInode { mode: 0o040_755, ..NewInode::default() }).map(drop),
            Operation::Mknod => self.create("new", NewInode { mode: 0o010_600, ..NewInode::default() }).map(drop),
            Operation::Symlink => {
                let new = NewInode { mode: 0o120_777, symlink_target: Some(b"target"), ..NewInode::default() };
                self.create("new", new).map(drop)
            }
            Operation::Tmpfile => fs.tmpfile(self.dir, 0o600, &ROOT).map(drop),
            Operation::Link => fs.link(self.find("f"), self.find("d"), b"new").map(drop),
            Operation::Rename(from, to) => self.rename(from, to, RenameFlags::empty()),
            Operation::Exchange(from, to) => self.rename(from, to, RenameFlags::EXCHANGE),
            Operation::Whiteout(from, to) => self.rename(from, to, RenameFlags::WHITEOUT),
            Operation::Setxattr(name) => {
                fs.setxattr(self.find("f"), name.as_bytes(), b"value", XattrFlags::empty(), &ROOT)
            }
            Operation::Removexattr => fs.removexattr(self.find("f"), b"user.old", &ROOT),
            Operation::Chmod => set("f", SetAttr { mode: Some(0o600), ..SetAttr::default() }),
            Operation::Utimes => set("f", SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() }),
            Operation::SetFlags => fs.set_inode_flags(self.find("f"), IFlags::NODUMP.bits(), &ROOT),
            Operation::Subvolume => fs.create_subvolume(self.dir, b"new", &ROOT).map(drop),
            Operation::SnapshotInside => fs.snapshot(self.dir.root, self.dir, b"new", false).map(drop),
            Operation::SnapshotOutside => {
                let name = format!("snapshot-of-{}", self.dir.root.0);
                fs.snapshot(self.dir.root, TOP, name.as_bytes(), false).map(drop)
            }
            Operation::SnapshotOfAnother => fs.snapshot(self.other.root, self.dir, b"new", false).map(drop),
            Operation::WriteNew => fs.write(self.find("g"), 0, &sector).map(drop),
            Operation::WriteInPlace => fs.write(self.find("nocow"), 0, &sector).map(drop),
            Operation::WritePreallocated => fs.write(self.find("prealloc"), 8 * SECTORSIZE, &sector).map(drop),
            Operation::Truncate(size) => set("big", SetAttr { size: Some(size), ..SetAttr::default() }),
            Operation::Punch => fs.fallocate(self.find("big"), 2 * SECTORSIZE, SECTORSIZE, PUNCH),
            Operation::Unlink => fs.unlink(self.dir, b"f"),
            Operation::Rmdir => fs.rmdir(self.dir, b"e"),
        }
    }
}

impl Side for Engine {
    fn prepare(&mut self, nr: usize) {
        let fs = &Arc::clone(&self.fs);
        self.dir = fs.create_subvolume(TOP, format!("s{nr}").as_bytes(), &ROOT).unwrap();
        for dir in ["d", "e", "d/e"] {
            self.create(dir, NewInode { mode: 0o040_755, ..NewInode::default() }).unwrap();
        }
        for file in ["f", "g", "d/f", "nocow"] {
            let id = self.create(file, NewInode::file(0o644)).unwrap();
            fs.write(id, 0, if file == "nocow" { b"" } else { b"few" }).unwrap();
        }
        fs.setxattr(self.find("f"), b"user.old", b"old", XattrFlags::empty(), &ROOT).unwrap();
        let big = self.create("big", NewInode::file(0o644)).unwrap();
        fs.write(big, 0, &Rng::new(1).bytes(1 << 20)).unwrap();
        fs.set_inode_flags(self.find("nocow"), IFlags::NOCOW.bits(), &ROOT).unwrap();
        fs.write(self.find("nocow"), 0, &[7; 256 << 10]).unwrap();
        let prealloc = self.create("prealloc", NewInode::file(0o644)).unwrap();
        fs.fallocate(prealloc, 0, 1 << 20, FallocateMode::empty()).unwrap();
        settle(fs);
    }

    fn limit(&mut self, room: i64) {
        let id = QgroupId::of_subvolume(self.dir.root);
        let limit = referenced(&self.fs, self.dir).checked_add_signed(room).unwrap();
        self.fs.limit_qgroup(id, Some(Some(limit)), None).unwrap();
    }

    fn perform(&mut self, operation: Operation) -> i32 {
        self.try_perform(operation).err().map_or(0, |error| error.errno())
    }
}

fn referenced(fs: &Fs, dir: InodeId) -> u64 {
    let id = QgroupId::of_subvolume(dir.root);
    fs.qgroups().unwrap().iter().find(|group| group.id == id).unwrap().referenced
}

#[test]
fn operations_are_refused_at_the_limits_of_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    fs.enable_quotas(QuotaKind::Full).unwrap();
    let other = fs.create_subvolume(TOP, b"other", &ROOT).unwrap();
    let mut engine = Engine { fs, dir: other, other };
    run_table(&mut engine, |row| row.2);
    settle(&engine.fs);
    engine.fs.close().unwrap();
    drop(engine);
    check_quotas(image.path()).unwrap();
    btrfs_check(image.path()).unwrap();

    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    mount.enable_quota().unwrap();
    run("btrfs", ["subvolume", "create", &mount.join("other").to_string_lossy()]).unwrap();
    let mut linux = Linux { dir: mount.path().to_owned(), mount, id: 0 };
    run_table(&mut linux, |row| row.1);
    linux.mount.close().unwrap();
}

/// A filesystem with a subvolume whose referenced bytes are limited.
struct Limited {
    image: Image,
    fs: Arc<Fs>,
    dir: InodeId,
}

impl Limited {
    const LIMIT: u64 = 16 << 20;

    fn new() -> Self {
        let image = Image::kernel_made(1 << 30, &[]).unwrap();
        let fs = open(&image, "");
        let dir = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
        fs.enable_quotas(QuotaKind::Full).unwrap();
        settle(&fs);
        Self { image, fs, dir }
    }

    fn limit(&self, bytes: u64) {
        settle(&self.fs);
        self.fs.limit_qgroup(QgroupId::of_subvolume(self.dir.root), Some(Some(bytes)), None).unwrap();
    }

    fn file(&self, name: &str) -> InodeId {
        self.fs.create(self.dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id
    }

    fn referenced(&self) -> u64 {
        settle(&self.fs);
        referenced(&self.fs, self.dir)
    }

    fn judge(self) {
        self.fs.close().unwrap();
        drop(self.fs);
        check_quotas(self.image.path()).unwrap();
        btrfs_check(self.image.path()).unwrap();
    }
}

/// Writes into preallocated space split extent items, whose tree blocks count.
#[test]
fn writes_into_preallocated_space_end_at_the_limit() {
    if !capability::kernel_oracle() {
        return;
    }
    let test = Limited::new();
    let fs = &test.fs;
    let file = test.file("f");
    fs.fallocate(file, 0, Limited::LIMIT - (256 << 10), FallocateMode::empty()).unwrap();
    let nocow = test.file("nocow");
    fs.set_inode_flags(nocow, IFlags::NOCOW.bits(), &ROOT).unwrap();
    fs.write(nocow, 0, &[1; 64 << 10]).unwrap();
    test.limit(Limited::LIMIT);
    let nr_written = (0..2000).take_while(|nr| fs.write(file, nr * 8192, &[7; 4096]).is_ok()).count() as u64;
    // Linux writes about 1,350 sectors in this room.
    assert!((600..2000).contains(&nr_written), "{nr_written}");
    let used = test.referenced();
    println!("{nr_written} sectors written, {used} of {} bytes counted", Limited::LIMIT);
    assert!((Limited::LIMIT - 3 * NODESIZE..=Limited::LIMIT).contains(&used), "{used}");
    assert_eq!(fs.write(file, nr_written * 8192, &[7; 4096]).unwrap_err().errno(), EDQUOT);
    // Data that takes no space can be written far over the limit, and what makes room works.
    test.limit(SECTORSIZE);
    fs.write(nocow, 8192, &[2; 8192]).unwrap();
    fs.fsync(nocow, false).unwrap();
    fs.fallocate(file, 16 * SECTORSIZE, SECTORSIZE, PUNCH).unwrap();
    fs.fallocate(file, (nr_written + 40) * 8192, SECTORSIZE, PUNCH).unwrap();
    let cut = |size| fs.setattr(file, &SetAttr { size: Some(size), ..SetAttr::default() }, &ROOT).unwrap();
    cut((nr_written + 20) * 8192);
    let mut content = vec![0; 4096];
    for nr in (0..nr_written).filter(|nr| *nr != 8) {
        fs.read_into(file, nr * 8192, &mut content).unwrap();
        assert!(content == [7; 4096], "{nr}");
    }
    cut(0);
    fs.unlink(test.dir, b"f").unwrap();
    test.limit(Limited::LIMIT);
    fs.write(test.file("again"), 0, &[1; 1 << 20]).unwrap();
    test.judge();
}

/// Preallocation between scattered extents, and copies of scattered extents, add many items.
#[test]
fn items_of_preallocated_gaps_and_of_copies_obey_limits() {
    if !capability::kernel_oracle() {
        return;
    }
    const NR_SECTORS: u64 = 6000;
    let test = Limited::new();
    let fs = &test.fs;
    let scattered = test.file("f");
    for nr in 0..NR_SECTORS {
        fs.write(scattered, nr * 8192, &[7; 4096]).unwrap();
    }
    // All copies share the data, so only their items count.
    let used = test.referenced();
    let limit = used + 20 * NODESIZE;
    test.limit(limit);
    let copy = test.file("copy");
    let copied = fs.clone_range(scattered, 0, copy, 0, (NR_SECTORS - 1) * 8192 + 4096);
    assert_eq!(copied.unwrap_err().errno(), EDQUOT);
    let used = test.referenced();
    println!("copies: {used} of {limit} bytes counted");
    assert!((limit - 6 * NODESIZE..=limit).contains(&used), "{used} of {limit}");
    fs.unlink(test.dir, b"copy").unwrap();

    // The gaps' data fits, but not their items.
    let limit = test.referenced() + NR_SECTORS * 4096 + 4 * NODESIZE;
    test.limit(limit);
    let filled = fs.fallocate(scattered, 0, NR_SECTORS * 8192, FallocateMode::empty());
    assert_eq!(filled.unwrap_err().errno(), EDQUOT);
    let used = test.referenced();
    assert!(used <= limit, "{used} of {limit}");
    test.limit(limit + NR_SECTORS * 192);
    fs.fallocate(scattered, 0, NR_SECTORS * 8192, FallocateMode::empty()).unwrap();
    let used = test.referenced();
    assert!(used <= limit + NR_SECTORS * 192, "{used} of {limit}");
    test.judge();
}
