//! Chooses steps at random, from a seed and from Linux's answers to the earlier steps.

use std::collections::{BTreeMap, BTreeSet};

use rustix::fs::{FallocateFlags, OFlags};

use super::actor::{ACTORS, NR_DRAWN};
use super::call::{Call, Content, Kind, Seek, Step, Time};
use super::perform::{Answer, NR_SLOTS};
use crate::Rng;

/// The assumed type of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AssumedType {
    Directory,
    File,
    Other,
}

/// A source of steps. The generator tracks roughly which files exist, so that most calls name an existing file.
pub struct Generator {
    rng: Rng,
    first: Vec<Step>,
    known: BTreeMap<String, AssumedType>,
    /// The path and assumed type of the file that is open in each slot.
    slots: Vec<Option<(String, AssumedType)>>,
    /// The slots that have a mapping.
    mapped: BTreeSet<usize>,
    made: u64,
}

const READ: u32 = OFlags::RDONLY.bits();
const WRITE: u32 = OFlags::WRONLY.bits();
const READ_WRITE: u32 = OFlags::RDWR.bits();
const CREATE: u32 = OFlags::CREATE.bits();
const EXCL: u32 = OFlags::EXCL.bits();
const TRUNC: u32 = OFlags::TRUNC.bits();
const APPEND: u32 = OFlags::APPEND.bits();
const DIRECTORY: u32 = OFlags::DIRECTORY.bits();
const NOFOLLOW: u32 = OFlags::NOFOLLOW.bits();
const SYNC: u32 = OFlags::SYNC.bits();
const NOATIME: u32 = OFlags::NOATIME.bits();
const PATH: u32 = OFlags::PATH.bits();
const TMPFILE: u32 = OFlags::TMPFILE.bits();

const MODES: [u32; 16] =
    [0o644, 0o600, 0o666, 0o640, 0o664, 0o755, 0o777, 0o700, 0o070, 0o007, 0o4755, 0o2755, 0o6777, 0o1777, 0o2770, 0];
/// Names and symlink targets never lead out of the mount. Root makes some of the calls, and `..` or absolute paths
/// would let root change the machine's own files.
const NAMES: [&str; 9] = ["a", "b", "c", "d", "e", "f", "g", "h", "\u{e4}\u{ff}"];
/// A name of the largest allowed length.
const LONG_NAME: &str = match std::str::from_utf8(&[b'd'; 255]) {
    Ok(name) => name,
    Err(_) => "",
};
/// The longest directory path in which names are made. With the path of the mount point, which differs between the
/// sides, and a name, paths stay below the kernel's limit on both sides.
const LONGEST_DIR: usize = 3200;
const IDS: [u32; 6] = [0, 1001, 1002, 1003, 1004, 2000];
/// Inode flags: append-only, immutable, compressed, no compression, nocow, nodump, noatime, sync, dirsync, and one that
/// btrfs lacks.
const FLAGS: [u32; 10] = [0x20, 0x10, 0x4, 0x400, 0x80_0000, 0x40, 0x80, 0x8, 0x1_0000, 0x4000];

impl Generator {
    /// Makes the generator for a seed.
    pub fn new(seed: u64) -> Self {
        let mut generator = Self {
            rng: Rng::new(seed),
            first: Vec::new(),
            known: BTreeMap::new(),
            slots: vec![None; NR_SLOTS],
            mapped: BTreeSet::new(),
            made: 0,
        };
        generator.first = generator.start();
        generator.first.reverse();
        generator
    }

    /// Returns the first steps, which make directories with different owners for several users to act in.
    fn start(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut root = |call| steps.push(Step { user: 0, call });
        root(Call::Chmod { path: String::new(), mode: 0o1777 });
        for (path, mode, owner, group) in [
            ("open", 0o777, 0, 0),
            ("sticky", 0o1777, 0, 0),
            ("owned", 0o755, 1001, 1001),
            ("shared", 0o2775, 1001, 1001),
            ("group", 0o770, 1002, 2000),
        ] {
            let path = path.to_owned();
            root(Call::Mkdir { path: path.clone(), mode: 0o777 });
            root(Call::Chown { path: path.clone(), uid: Some(owner), gid: Some(group), follow: true });
            root(Call::Chmod { path, mode });
        }
        // Sometimes nest directories: 30 with a short name, or 10 with the longest possible name.
        let (name, depth) = *self.rng.pick(&[("", 0), ("", 0), ("p", 30), (LONG_NAME, 10)]);
        let mut path = "open".to_owned();
        for _ in 0..depth {
            path = format!("{path}/{name}");
            root(Call::Mkdir { path: path.clone(), mode: 0o777 });
        }
        steps
    }

    /// Chooses the next step.
    pub fn next_step(&mut self) -> Step {
        if let Some(step) = self.first.pop() {
            return step;
        }
        let user = if self.rng.one_in(3) { 0 } else { self.rng.index(NR_DRAWN) };
        let call = self.call();
        // Helpers make the calls on subvolumes, and a helper has only the capabilities that its user id implies (H1).
        // So if the chosen user has other capabilities, root makes the call instead.
        let user = if call.is_of_subvolumes() && ACTORS[user].has_own_capabilities() { 0 } else { user };
        Step { user, call }
    }

    fn call(&mut self) -> Call {
        match self.rng.below(1000) {
            0..120 => self.open(),
            120..150 => Call::Close { slot: self.slot() },
            150..420 => self.on_slot(),
            420..640 => self.on_names(),
            640..800 => self.on_attributes(),
            800..880 => self.on_xattrs(),
            880..940 => self.look(),
            940..962 => self.on_mapping(),
            962..978 => self.on_subvolumes(),
            978..980 => Call::Together { seed: self.rng.next_u64() },
            980..983 => Call::Umask { mask: *self.rng.pick(&[0, 0o022, 0o077, 0o027, 0o007]) },
            983..987 => Call::Sync,
            987..994 => Call::Compare,
            994..997 => Call::Remount,
            _ => Call::Swap,
        }
    }

    fn slot(&mut self) -> usize {
        // Usually pick an open slot.
        let open: Vec<usize> = (0..NR_SLOTS).filter(|&slot| self.slots[slot].is_some()).collect();
        if open.is_empty() || self.rng.one_in(20) { self.rng.index(NR_SLOTS) } else { *self.rng.pick(&open) }
    }

    fn slot_of(&mut self, kind: AssumedType) -> usize {
        let open: Vec<usize> =
            (0..NR_SLOTS).filter(|&slot| self.slots[slot].as_ref().is_some_and(|(_, guess)| *guess == kind)).collect();
        if open.is_empty() || self.rng.one_in(30) { self.slot() } else { *self.rng.pick(&open) }
    }

    /// Picks a path, which usually exists.
    fn path(&mut self) -> String {
        if self.known.is_empty() || self.rng.one_in(12) {
            return self.new_path();
        }
        let at = self.rng.index(self.known.len());
        let path = self.known.keys().nth(at).cloned().unwrap_or_default();
        if self.rng.one_in(60) { format!("{path}/") } else { path }
    }

    fn path_of(&mut self, kind: AssumedType) -> String {
        let paths: Vec<&String> =
            self.known.iter().filter(|(_, guess)| **guess == kind).map(|(path, _)| path).collect();
        if paths.is_empty() || self.rng.one_in(10) { self.path() } else { (*self.rng.pick(&paths)).clone() }
    }

    /// Picks a path that may or may not exist, in a directory that usually exists.
    fn new_path(&mut self) -> String {
        let dirs: Vec<&String> = self
            .known
            .iter()
            .filter(|(path, guess)| **guess == AssumedType::Directory && path.len() < LONGEST_DIR)
            .map(|(path, _)| path)
            .collect();
        let dir = if dirs.is_empty() || self.rng.one_in(8) { String::new() } else { (*self.rng.pick(&dirs)).clone() };
        let name = match self.rng.below(40) {
            0 => "n".repeat(255),
            1 => "l".repeat(256),
            2 => ".".to_owned(),
            4..10 => {
                self.made += 1;
                format!("new-{}", self.made)
            }
            _ => (*self.rng.pick(&NAMES)).to_owned(),
        };
        if dir.is_empty() { name } else { format!("{dir}/{name}") }
    }

    fn open(&mut self) -> Call {
        let slot = self.rng.index(NR_SLOTS);
        if self.rng.one_in(15) {
            let flags = TMPFILE | *self.rng.pick(&[WRITE, READ_WRITE, READ_WRITE, READ_WRITE | EXCL, READ]);
            return Call::Open {
                slot,
                path: self.path_of(AssumedType::Directory),
                flags,
                mode: *self.rng.pick(&MODES),
            };
        }
        if self.rng.one_in(8) {
            let path = self.path_of(AssumedType::Directory);
            return Call::Open { slot, path, flags: READ | DIRECTORY, mode: 0 };
        }
        let mut flags = *self.rng.pick(&[READ, WRITE, READ_WRITE, READ_WRITE, READ_WRITE]);
        let path = if self.rng.one_in(2) {
            flags |= CREATE;
            self.new_path()
        } else {
            self.path_of(AssumedType::File)
        };
        for (flag, one_in) in [
            (CREATE, 8),
            (EXCL, 12),
            (TRUNC, 8),
            (APPEND, 5),
            (NOFOLLOW, 12),
            (SYNC, 20),
            (NOATIME, 20),
            (PATH, 40),
            (DIRECTORY, 40),
        ] {
            if self.rng.one_in(one_in) {
                flags |= flag;
            }
        }
        Call::Open { slot, path, flags, mode: *self.rng.pick(&MODES) }
    }

    fn offset(&mut self) -> u64 {
        match self.rng.below(12) {
            0..5 => self.rng.len(300_000),
            5..9 => 4096 * self.rng.below(80),
            9 => 0,
            10 => self.rng.len(1 << 32),
            _ => *self.rng.pick(&[i64::MAX as u64, i64::MAX as u64 - 4095, 1 << 40]),
        }
    }

    fn small_offset(&mut self) -> u64 {
        if self.rng.one_in(2) { 4096 * self.rng.below(80) } else { self.rng.len(300_000) }
    }

    fn content(&mut self) -> Content {
        Content { seed: self.rng.next_u64(), len: usize::try_from(self.rng.len(140_000)).unwrap_or(1) }
    }

    fn on_slot(&mut self) -> Call {
        let slot = self.slot_of(AssumedType::File);
        match self.rng.below(100) {
            0..10 => Call::Read { slot, len: usize::try_from(self.rng.len(200_000)).unwrap_or(1) },
            10..24 => Call::Pread { slot, at: self.offset(), len: usize::try_from(self.rng.len(200_000)).unwrap_or(1) },
            24..36 => Call::Write { slot, data: self.content() },
            36..52 => Call::Pwrite { slot, at: self.small_offset(), data: self.content() },
            52..62 => {
                let whence = *self.rng.pick(&[Seek::Set, Seek::Current, Seek::End, Seek::Data, Seek::Data, Seek::Hole]);
                let at = i64::try_from(self.offset()).unwrap_or(0);
                Call::Lseek { slot, whence, at: if self.rng.one_in(8) { -at } else { at } }
            }
            62..68 => Call::Ftruncate { slot, len: self.offset() },
            68..78 => {
                let (keep, punch) = (FallocateFlags::KEEP_SIZE.bits(), FallocateFlags::PUNCH_HOLE.bits());
                let zero = FallocateFlags::ZERO_RANGE.bits();
                let modes = [0, keep, keep | punch, keep | punch, zero, zero | keep, punch, 0x8, 0x20, 0x40];
                let mode = *self.rng.pick(&modes);
                Call::Fallocate { slot, mode, at: self.small_offset(), len: self.rng.below(200_000) }
            }
            78..86 => Call::CopyFileRange {
                from: slot,
                from_at: self.small_offset(),
                to: self.slot_of(AssumedType::File),
                to_at: self.small_offset(),
                len: usize::try_from(self.rng.len(200_000)).unwrap_or(1),
            },
            86..88 => Call::Fsync { slot, data_only: self.rng.one_in(2) },
            88..90 => Call::Fchmod { slot: self.slot(), mode: *self.rng.pick(&MODES) },
            90..92 => Call::Fchown { slot: self.slot(), uid: self.id(), gid: self.id() },
            92..94 => Call::Flock { slot, exclusive: *self.rng.pick(&[None, Some(false), Some(true)]) },
            94..96 => Call::Getdents { slot: self.slot_of(AssumedType::Directory), entries: 1 + self.rng.index(10) },
            96 => Call::Rewind { slot: self.slot() },
            _ => Call::LinkSlot { slot, to: self.new_path() },
        }
    }

    fn on_mapping(&mut self) -> Call {
        let mapped: Vec<usize> = self.mapped.iter().copied().collect();
        if mapped.is_empty() || self.rng.one_in(4) {
            return Call::Map {
                slot: self.slot_of(AssumedType::File),
                len: 1 + self.rng.index(200_000),
                write: !self.rng.one_in(6),
            };
        }
        let slot = if self.rng.one_in(30) { self.slot() } else { *self.rng.pick(&mapped) };
        let at = if self.rng.one_in(4) { self.small_offset() } else { self.rng.len(50_000) };
        match self.rng.below(10) {
            0..5 => {
                let len = 1 + self.rng.index(12_000);
                Call::MapStore { slot, at, data: Content { seed: self.rng.next_u64(), len } }
            }
            5 | 6 => Call::MapLoad { slot, at, len: 1 + self.rng.index(20_000) },
            7 | 8 => Call::MapSync { slot },
            _ => Call::Unmap { slot },
        }
    }

    fn on_subvolumes(&mut self) -> Call {
        let new = self.new_path();
        self.made += 1;
        let new = match new.rsplit_once('/') {
            Some((dir, _)) if !self.rng.one_in(8) => format!("{dir}/sub-{}", self.made),
            None if !self.rng.one_in(8) => format!("sub-{}", self.made),
            _ => new,
        };
        let is_of_subvolume = |path: &&String| path.rsplit('/').next().is_some_and(|name| name.starts_with("sub-"));
        let known: Vec<String> = self.known.keys().filter(is_of_subvolume).cloned().collect();
        if known.is_empty() {
            return Call::SubvolCreate { path: new };
        }
        let path = if self.rng.one_in(10) { self.path() } else { self.rng.pick(&known).clone() };
        match self.rng.below(12) {
            0..3 => Call::SubvolCreate { path: new },
            3..6 => {
                let from = if self.rng.one_in(5) { String::new() } else { path };
                Call::SubvolSnapshot { from, to: new, read_only: self.rng.one_in(3) }
            }
            6..8 => Call::SubvolDelete { path },
            8..11 => Call::SubvolSetFlags { path, read_only: self.rng.one_in(2) },
            _ => Call::SubvolGetFlags { path },
        }
    }

    fn on_names(&mut self) -> Call {
        match self.rng.below(100) {
            0..20 => Call::Mkdir { path: self.new_path(), mode: *self.rng.pick(&MODES) },
            20..34 => {
                let kinds = [Kind::File, Kind::File, Kind::Fifo, Kind::Socket, Kind::CharDevice, Kind::BlockDevice];
                let kind = *self.rng.pick(&kinds);
                // A whiteout is the character device 0,0. No driver handles the number given to block devices.
                let (major, minor) = match kind {
                    Kind::CharDevice => *self.rng.pick(&[(0, 0), (0, 0), (1, 3)]),
                    _ => (240, 300),
                };
                Call::Mknod { path: self.new_path(), kind, mode: *self.rng.pick(&MODES), major, minor }
            }
            34..42 => {
                let target = match self.rng.below(10) {
                    0 => String::new(),
                    1 => "t".repeat(4095),
                    3 => "s".repeat(1000),
                    _ => self.path(),
                };
                Call::Symlink { path: self.new_path(), target }
            }
            42..52 => Call::Link { from: self.path(), to: self.new_path(), follow: self.rng.one_in(4) },
            52..64 => Call::Unlink { path: self.path() },
            64..72 => Call::Rmdir { path: self.path_of(AssumedType::Directory) },
            _ => {
                let from = self.path();
                let to = if self.rng.one_in(2) { self.path() } else { self.new_path() };
                // Flags of renameat2: NOREPLACE (1), EXCHANGE (2), WHITEOUT (4), and invalid combinations.
                let flags = *self.rng.pick(&[0, 0, 0, 0, 1, 2, 2, 4, 4, 5, 6, 3]);
                Call::Rename { from, to, flags }
            }
        }
    }

    fn id(&mut self) -> Option<u32> {
        if self.rng.one_in(3) { None } else { Some(*self.rng.pick(&IDS)) }
    }

    fn time(&mut self) -> Time {
        match self.rng.below(8) {
            0 | 1 => Time::Now,
            2 | 3 => Time::Omit,
            4 => Time::At(-1 - i64::try_from(self.rng.below(1 << 33)).unwrap_or(0), 5),
            5 => Time::At(5_000_000_000, 999_999_999),
            _ => Time::At(i64::try_from(self.rng.below(1_000_000_000)).unwrap_or(0), 123_456_789),
        }
    }

    fn on_attributes(&mut self) -> Call {
        match self.rng.below(100) {
            0..25 => Call::Chmod { path: self.path(), mode: *self.rng.pick(&MODES) },
            25..45 => Call::Chown { path: self.path(), uid: self.id(), gid: self.id(), follow: self.rng.one_in(2) },
            45..60 => {
                Call::Utimens { path: self.path(), atime: self.time(), mtime: self.time(), follow: self.rng.one_in(2) }
            }
            60..75 => Call::Truncate { path: self.path_of(AssumedType::File), len: self.small_offset() },
            75..92 => {
                let mut flags = 0;
                for _ in 0..self.rng.below(3) {
                    flags |= *self.rng.pick(&FLAGS);
                }
                Call::SetFlags { path: self.path(), flags }
            }
            _ => {
                let values = ["zstd", "lzo", "zlib", "none", "no", "", "zstd:3", "lzma"];
                Call::SetProperty { path: self.path(), value: (*self.rng.pick(&values)).to_owned() }
            }
        }
    }

    fn xattr_name(&mut self) -> String {
        let names = [
            "user.a",
            "user.b",
            "user.long-name-of-an-attribute",
            "trusted.t",
            "security.s",
            "security.capability",
            "system.posix_acl_access",
            "system.posix_acl_default",
            "btrfs.compression",
            "unknown.u",
            "user.",
            "user",
        ];
        (*self.rng.pick(&names)).to_owned()
    }

    fn on_xattrs(&mut self) -> Call {
        let path = self.path();
        match self.rng.below(100) {
            0..25 => {
                let len = match self.rng.below(10) {
                    0 => 0,
                    1 => 60_000,
                    2 => 16_000,
                    _ => usize::try_from(self.rng.len(3000)).unwrap_or(0),
                };
                let value = Content { seed: self.rng.next_u64(), len };
                let mut name = self.xattr_name();
                if name.starts_with("system.") || name.starts_with("btrfs.") || name == "security.capability" {
                    name = "user.c".to_owned();
                }
                Call::Setxattr { path, name, value, flags: *self.rng.pick(&[0, 0, 0, 1, 2]) }
            }
            25..65 => self.acl(path),
            65..75 => Call::Getxattr { path, name: self.xattr_name() },
            75..88 => Call::Removexattr { path, name: self.xattr_name() },
            _ => Call::Listxattr { path },
        }
    }

    /// Makes a call that sets an ACL, usually a valid one: user, named users, group, named groups, mask, other.
    fn acl(&mut self, path: String) -> Call {
        let any = u32::MAX;
        let mut acl = vec![(0x01, self.permissions(), any)];
        let mut named = false;
        for id in [1001, 1002, 1003] {
            if self.rng.one_in(4) {
                acl.push((0x02, self.permissions(), id));
                named = true;
            }
        }
        acl.push((0x04, self.permissions(), any));
        for id in [1001, 2000] {
            if self.rng.one_in(4) {
                acl.push((0x08, self.permissions(), id));
                named = true;
            }
        }
        if named || self.rng.one_in(3) {
            acl.push((0x10, self.permissions(), any));
        }
        acl.push((0x20, self.permissions(), any));
        match self.rng.below(20) {
            0 => drop(acl.pop()),
            1 => acl.reverse(),
            2 => acl.clear(),
            _ => {}
        }
        Call::SetAcl { path, default: self.rng.one_in(3), acl }
    }

    fn permissions(&mut self) -> u16 {
        u16::try_from(self.rng.below(8)).unwrap_or(7)
    }

    fn look(&mut self) -> Call {
        let path = self.path();
        match self.rng.below(100) {
            0..20 => Call::Stat { path, follow: self.rng.one_in(2) },
            20..50 => {
                let mode = u32::try_from(self.rng.below(8)).unwrap_or(7);
                Call::Access { path, mode, effective: self.rng.one_in(2) }
            }
            50..70 => Call::Readdir { path: self.path_of(AssumedType::Directory) },
            70..85 => Call::Readlink { path: self.path_of(AssumedType::Other) },
            _ => Call::GetFlags { path },
        }
    }

    /// Updates the known objects, slots and mappings after a step, according to Linux's answer.
    pub(crate) fn learn(&mut self, step: &Step, linux: &Answer) {
        let good = linux.is_ok();
        match &step.call {
            Call::Remount | Call::Swap => {
                self.slots.fill(None);
                self.mapped.clear();
            }
            // A failed call removes the old mapping of the slot.
            Call::Map { slot, .. } if !good => drop(self.mapped.remove(slot)),
            _ if !good => {}
            // A helper that died lost all of its mappings.
            _ if linux.iter().flatten().any(|(field, _)| field == "killed by") => self.mapped.clear(),
            Call::Map { slot, .. } => drop(self.mapped.insert(*slot)),
            Call::Unmap { slot } => drop(self.mapped.remove(slot)),
            Call::Open { slot, path, flags, .. } => {
                let kind = if flags & TMPFILE == DIRECTORY { AssumedType::Directory } else { AssumedType::File };
                self.slots[*slot] = Some((path.clone(), kind));
                if flags & CREATE != 0 {
                    self.known.entry(path.clone()).or_insert(AssumedType::File);
                }
            }
            Call::Close { slot } => self.slots[*slot] = None,
            Call::Mkdir { path, .. } => self.add(path, AssumedType::Directory),
            Call::Mknod { path, kind, .. } => {
                self.add(path, if *kind == Kind::File { AssumedType::File } else { AssumedType::Other });
            }
            Call::Symlink { path, .. } => self.add(path, AssumedType::Other),
            Call::Link { from, to, .. } => {
                let kind = self.known.get(from).copied().unwrap_or(AssumedType::File);
                self.add(to, kind);
            }
            Call::LinkSlot { to, .. } => self.add(to, AssumedType::File),
            Call::SubvolCreate { path } => self.add(path, AssumedType::Directory),
            Call::SubvolDelete { path } => drop(self.take(path.trim_end_matches('/'))),
            Call::SubvolSnapshot { from, to, .. } => {
                let copied = self.below(from.trim_end_matches('/'));
                for (rest, kind) in copied {
                    self.known.insert(format!("{to}{rest}"), kind);
                }
                self.add(to, AssumedType::Directory);
            }
            Call::Unlink { path } | Call::Rmdir { path } => {
                self.known.remove(path.trim_end_matches('/'));
            }
            Call::Rename { from, to, flags } => self.moved(from, to, *flags),
            _ => {}
        }
    }

    fn add(&mut self, path: &str, kind: AssumedType) {
        let path = path.trim_end_matches('/');
        if !path.ends_with("/.") {
            self.known.insert(path.to_owned(), kind);
        }
    }

    fn moved(&mut self, from: &str, to: &str, flags: u32) {
        let (from, to) = (from.trim_end_matches('/'), to.trim_end_matches('/'));
        let first = self.take(from);
        let second = self.take(to);
        for (rest, kind) in first {
            self.known.insert(format!("{to}{rest}"), kind);
        }
        if flags & 2 != 0 {
            for (rest, kind) in second {
                self.known.insert(format!("{from}{rest}"), kind);
            }
        } else if flags & 4 != 0 {
            self.known.insert(from.to_owned(), AssumedType::Other);
        }
    }

    /// Returns at most 40 of the known objects below `path`, with their paths relative to `path`.
    fn below(&self, path: &str) -> Vec<(String, AssumedType)> {
        let start = if path.is_empty() { String::new() } else { format!("{path}/") };
        let known = self.known.iter().filter(|(known, _)| known.starts_with(&start)).take(40);
        known.map(|(known, kind)| (format!("/{}", &known[start.len()..]), *kind)).collect()
    }

    /// Removes a path and everything below it from the known objects. Returns the removed objects, with their paths
    /// relative to `path`.
    fn take(&mut self, path: &str) -> Vec<(String, AssumedType)> {
        let below = format!("{path}/");
        let taken: Vec<String> =
            self.known.keys().filter(|known| *known == path || known.starts_with(&below)).cloned().collect();
        taken
            .into_iter()
            .filter_map(|known| self.known.remove(&known).map(|kind| (known[path.len()..].to_owned(), kind)))
            .collect()
    }
}
