//! Random changes of subvolumes for the tests of quotas.

// No single test file uses all helpers of this module.
#![allow(dead_code, reason = "compiled once for each test file")]

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, QgroupId};
use ubtrfs_testkit::{Image, LoopMount, Rng};

pub(crate) const ROOT: Caller = Caller::ROOT;
pub(crate) const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };

pub(crate) use ubtrfs_testkit::QuotaNumbers as Numbers;

/// Opens an image for writing.
pub(crate) fn open(image: &Image, options: &str) -> Arc<Fs> {
    let options = MountOptions::parse(options).unwrap();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    Fs::open(vec![device], options).unwrap()
}

/// Waits until the quota numbers contain all changes.
pub(crate) fn settle(fs: &Fs) {
    fs.sync().unwrap();
    fs.finish_deletions(&mut |_| Ok(())).unwrap();
    fs.wait_for_quota_rescan(&Job::new()).unwrap();
}

/// The quota numbers that the engine shows.
pub(crate) fn numbers(fs: &Fs) -> Numbers {
    let groups = fs.qgroups().unwrap();
    groups.iter().map(|group| (group.id.to_string(), (group.referenced, group.exclusive))).collect()
}

/// The quota numbers that Linux shows for a mounted image.
pub(crate) fn numbers_shown(mount: &LoopMount) -> Numbers {
    let (numbers, is_inconsistent) = mount.quota_numbers().unwrap().expect("quotas are on");
    assert!(!is_inconsistent, "{numbers:?}\n{}", mount.kernel_log());
    numbers
}

/// Writes to a file. Creates the file if it does not exist.
pub(crate) fn write(fs: &Fs, dir: InodeId, name: &str, at: u64, content: &[u8]) {
    let id = match fs.lookup(dir, name.as_bytes()) {
        Ok(attr) => attr.id,
        Err(_) => fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id,
    };
    fs.write(id, at, content).unwrap();
}

/// Makes random changes of subvolumes, and keeps the list of the subvolumes that exist.
pub(crate) struct Rounds {
    /// The source of random choices.
    pub(crate) rng: Rng,
    /// Names of the existing subvolumes, all in the top-level directory.
    pub(crate) names: Vec<String>,
    /// The number in the name of the next new subvolume.
    pub(crate) next: u32,
}

impl Rounds {
    /// Makes one random change.
    pub(crate) fn step(&mut self, fs: &Fs) {
        let name = self.names[self.rng.index(self.names.len())].clone();
        let dir = fs.lookup(TOP, name.as_bytes()).unwrap().id;
        let file = format!("f{}", self.rng.below(60));
        match self.rng.below(20) {
            0..=6 => {
                let (at, len) = (self.rng.below(300_000), 1 + self.rng.len(60_000) as usize);
                let content = self.rng.bytes(len);
                write(fs, dir, &file, at, &content);
            }
            7..=8 => {
                for number in 0..self.rng.below(80) {
                    write(fs, dir, &format!("small{number}"), 0, &[1; 3000]);
                }
            }
            9..=10 => drop(fs.unlink(dir, file.as_bytes())),
            11..=12 => {
                let other = self.names[self.rng.index(self.names.len())].clone();
                let to = fs.lookup(TOP, other.as_bytes()).unwrap().id;
                let Ok(source) = fs.lookup(dir, file.as_bytes()) else { return };
                write(fs, to, "copy", 0, b"x");
                let target = fs.lookup(to, b"copy").unwrap().id;
                let len = source.size / 4096 * 4096;
                if len > 0 && source.id != target {
                    fs.clone_range(source.id, 0, target, 4096 * self.rng.below(20), len).unwrap();
                }
            }
            13 => {
                let Ok(target) = fs.lookup(dir, file.as_bytes()) else { return };
                fs.fallocate(target.id, self.rng.below(100) * 4096, 100_000, FallocateMode::KEEP_SIZE).unwrap();
            }
            14..=16 if self.names.len() < 12 => {
                let new = format!("s{}", self.next);
                self.next += 1;
                let groups: Vec<QgroupId> = fs
                    .qgroups()
                    .map(|groups| groups.iter().map(|group| group.id).filter(|id| id.level() > 0).collect())
                    .unwrap_or_default();
                let groups: Vec<QgroupId> = groups.into_iter().filter(|_| self.rng.below(3) == 0).collect();
                if self.rng.below(4) == 0 {
                    fs.create_subvolume_in(TOP, new.as_bytes(), &ROOT, &groups).unwrap();
                } else {
                    fs.snapshot_in(dir.root, TOP, new.as_bytes(), false, &groups).unwrap();
                }
                self.names.push(new);
            }
            17..=18 if self.names.len() > 2 => {
                let at = self.rng.index(self.names.len());
                let gone = self.names.remove(at);
                fs.delete_subvolume(TOP, gone.as_bytes(), None).unwrap();
            }
            _ => fs.sync().unwrap(),
        }
    }

    /// Makes a shell command by which Linux changes the subvolume `name`; `kind` selects the change. `new` is the name
    /// of the snapshot, if the command makes one.
    pub(crate) fn command_of_linux(&mut self, kind: u64, name: &str, file: u64, new: String) -> String {
        match kind {
            0 if self.names.len() < 12 => {
                let command = format!("btrfs -q subvolume snapshot {name} {new}\n");
                self.names.push(new);
                command
            }
            1 if self.names.len() > 3 => {
                self.names.retain(|other| other != name);
                format!("btrfs -q subvolume delete {name}\n")
            }
            2 => format!("for f in $(seq 40); do head -c 5000 /dev/urandom > {name}/small$f; done\n"),
            3 => format!("rm -f {name}/f{file} {name}/small{file}\n"),
            _ => format!("head -c 90000 /dev/urandom | dd of={name}/f{file} conv=notrunc status=none\n"),
        }
    }
}
