//! The long script: mixes and repeats the operations of the short scripts, until each kind of request was made
//! 2,000 times.
//!
//! - L1. Each round makes 20 changes of files, fsyncs nearly every change, and syncs once.
//! - L2. Each round ends with a remount. After a remount, the script reads all files; the content comes from the
//!   device because the caches are empty.

use super::Script;
use crate::target::RenameOp::{Exchange, NoReplace, Replace};
use crate::target::{FallocateOp, Target};

/// The number of rounds, which is enough for 2,000 reads. Reads are the rarest kind of request.
const ROUNDS: usize = 54;
/// Number of changes in each round.
const CHANGES: usize = 20;
/// The largest number of files kept at a time.
const MOST_FILES: usize = 30;
const DIRS: [&str; 4] = ["", "dir/", "dir/sub/", "other/"];
const BLOCK: u64 = 4096;
/// Length of a shared range.
const SHARED: u64 = 4 * BLOCK;

/// A file that the script has made.
struct File {
    path: String,
    len: u64,
    has_xattr: bool,
}

impl Script {
    /// Makes a long workload, for faults at any of the first 2,000 reads, writes and flushes.
    pub fn long(seed: u64) -> Self {
        let mut s = Self::new("long", seed);
        let mut files = Vec::new();
        for dir in DIRS.iter().filter(|dir| !dir.is_empty()) {
            s.mkdir(dir.trim_end_matches('/'));
        }
        for round in 0..ROUNDS {
            for change in 0..CHANGES {
                s.long_change(&mut files, round * CHANGES + change);
            }
            s.sync();
            s.remount();
            for file in &files {
                s.read(&file.path, 0, file.len as usize);
            }
        }
        s
    }

    /// Makes one change and, usually, fsyncs it.
    fn long_change(&mut self, files: &mut Vec<File>, number: usize) {
        let dir = *self.rng.pick(&DIRS);
        if files.len() < 4 || (files.len() < MOST_FILES && self.rng.one_in(4)) {
            let path = format!("{dir}file-{number}");
            self.create(&path);
            let len = self.content(&path, 0);
            self.fsync(&path);
            files.push(File { path, len, has_xattr: false });
            return;
        }
        let at = self.rng.index(files.len());
        let path = files[at].path.clone();
        let len = files[at].len;
        match self.rng.below(14) {
            0..2 => files[at].len = self.content(&path, len),
            2 => {
                let offset = self.rng.below(len + 1);
                files[at].len = len.max(self.content(&path, offset));
            }
            3 => {
                files[at].len = self.rng.below(len + 10_000);
                self.truncate(&path, files[at].len);
            }
            4 => {
                let (offset, size) = (self.rng.below(len + 1), 1 + self.rng.below(40_000));
                let ops =
                    [FallocateOp::Allocate, FallocateOp::KeepSize, FallocateOp::PunchHole, FallocateOp::ZeroRange];
                let op = *self.rng.pick(&ops);
                self.fallocate(&path, offset, size, op);
                if matches!(op, FallocateOp::Allocate | FallocateOp::ZeroRange) {
                    files[at].len = len.max(offset + size);
                }
            }
            5..7 => return self.replace_by_rename(files, at, number),
            7 => {
                let new = format!("{dir}moved-{number}");
                self.rename(&path, &new, NoReplace);
                files[at].path = new;
            }
            8 => {
                let other = self.rng.index(files.len());
                if other != at {
                    self.rename(&path, &files[other].path.clone(), Exchange);
                    let other_path = files[other].path.clone();
                    files[other].path = std::mem::replace(&mut files[at].path, other_path);
                }
            }
            9..11 => self.share(files, at),
            11 => {
                if std::mem::replace(&mut files[at].has_xattr, true) {
                    self.remove_xattr(&path, "user.long");
                    files[at].has_xattr = false;
                } else {
                    let len = self.len(900);
                    self.xattr(&path, "user.long", len);
                }
            }
            12 => return self.names(&path, dir, number),
            _ => {
                self.unlink(&path);
                files.swap_remove(at);
                return self.fsync_dir(&path);
            }
        }
        let path = files[at].path.clone();
        self.fsync(&path);
    }

    /// Writes content at the offset `at`; some of the content compresses. Returns the end of the written range.
    fn content(&mut self, path: &str, at: u64) -> u64 {
        let len = if self.rng.one_in(3) {
            let len = self.len(90_000);
            self.text(path, at, len);
            len
        } else {
            let len = self.len(16_000);
            self.noise(path, at, len);
            len
        };
        at + len as u64
    }

    /// Writes a new version of a file to a temporary file, fsyncs that file, and renames it over the old version.
    fn replace_by_rename(&mut self, files: &mut [File], at: usize, number: usize) {
        let (tmp, path) = (format!("tmp-{number}"), files[at].path.clone());
        self.create(&tmp);
        files[at].len = self.content(&tmp, 0);
        files[at].has_xattr = false;
        self.fsync(&tmp);
        self.rename(&tmp, &path, Replace);
        if self.rng.one_in(2) {
            self.fsync(&path);
        } else {
            self.fsync_dir(&path);
        }
    }

    /// Copies the first blocks of another file into a file as a reflink, if the other file has enough blocks.
    fn share(&mut self, files: &mut [File], at: usize) {
        let from = self.rng.index(files.len());
        if from == at || files[from].len < SHARED {
            return;
        }
        let to_at = self.rng.below(files[at].len / BLOCK + 1) * BLOCK;
        let (source, path) = (files[from].path.clone(), files[at].path.clone());
        self.copy(&source, 0, &path, to_at, SHARED);
        files[at].len = files[at].len.max(to_at + SHARED);
    }

    /// Makes a second name, a symbolic link and a directory, changes a mode, and removes most of the new names
    /// again.
    fn names(&mut self, path: &str, dir: &str, number: usize) {
        let (link, symlink, sub) =
            (format!("{dir}link-{number}"), format!("{dir}symlink-{number}"), format!("{dir}sub-{number}"));
        self.link(path, &link);
        self.fsync(&link);
        self.symlink(&symlink, path);
        self.mkdir(&sub);
        self.fsync(&sub);
        let to_path = path.to_owned();
        self.act(format!("chmod {path} 600"), move |to: &mut dyn Target| to.chmod(to_path.as_bytes(), 0o600));
        self.fsync(path);
        self.unlink(&link);
        self.unlink(&symlink);
        if self.rng.one_in(2) {
            self.rmdir(&sub);
        }
        self.fsync_dir(&link);
    }

    fn fsync_dir(&mut self, path: &str) {
        self.fsync(path.rsplit_once('/').map_or("", |(dir, _)| dir));
    }
}
