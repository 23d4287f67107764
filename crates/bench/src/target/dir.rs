//! [`DirTarget`]: a directory of any mounted filesystem, used by ordinary system calls.
//!
//! Names are resolved from the given directory, as in tar and fs_mark. No other directory is kept open, so a tree may
//! have more directories than a process may have open files.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use ubtrfs_control::{Channel, ConnectError};

use super::{Admin, BenchTarget, EntryKind, Meta};
use crate::machine;

/// The directory to work in.
#[derive(Debug)]
pub(crate) struct DirTarget {
    path: PathBuf,
    root: OwnedFd,
}

impl DirTarget {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())
            .with_context(|| format!("cannot open the directory {}", path.display()))?;
        Ok(Self { path: path.to_owned(), root })
    }
}

impl DirTarget {
    /// Returns the control channel of the ubtrfs mount that contains the directory; `None` on other filesystems.
    fn channel(&self) -> Result<Option<Channel<'static>>> {
        match Channel::mount(&self.path) {
            Ok(channel) => Ok(Some(channel)),
            Err(ConnectError::NotOurs) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Runs `btrfs`, or `ubtrfs` if the directory is in a mount of ubtrfs. `paths` are relative to the directory.
    fn run(&self, command: &[&str], paths: &[&Path]) -> Result<()> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| self.path.join(path)).collect();
        let paths = paths.iter().map(|path| path.as_os_str());
        let args: Vec<&OsStr> = command.iter().map(OsStr::new).chain(paths).collect();
        self.run_with(&args, File::options().write(true).open("/dev/null")?)
    }

    /// Runs `btrfs` or `ubtrfs` with this standard output.
    fn run_with(&self, args: &[&OsStr], stdout: File) -> Result<()> {
        let program = match self.channel()? {
            Some(_) => machine::beside("ubtrfs")?,
            None => machine::program("btrfs")?,
        };
        let call = Command::new(&program).args(args).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).spawn();
        let failed = || format!("cannot run {}", program.display());
        let output = call.with_context(failed)?.wait_with_output().with_context(failed)?;
        if !output.status.success() {
            let command = args.join(OsStr::new(" "));
            bail!("{}: {}", command.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }
}

fn join(dir: &Path, name: &[u8]) -> PathBuf {
    dir.join(OsStr::from_bytes(name))
}

/// Adds the path to an error.
fn at<T>(result: rustix::io::Result<T>, what: &'static str, path: &Path) -> Result<T> {
    result.with_context(|| format!("{what} {}", path.display()))
}

fn times(meta: &Meta) -> Timestamps {
    let time = Timespec { tv_sec: meta.mtime, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

impl BenchTarget for DirTarget {
    /// A path relative to the directory of the target.
    type Dir = PathBuf;
    type File = OwnedFd;

    fn root(&self) -> Result<PathBuf> {
        Ok(PathBuf::new())
    }

    fn mkdir(&self, dir: &PathBuf, name: &[u8], mode: u32) -> Result<PathBuf> {
        let path = join(dir, name);
        at(rustix::fs::mkdirat(&self.root, &path, Mode::from_raw_mode(mode)), "mkdir", &path)?;
        Ok(path)
    }

    fn child(&self, dir: &PathBuf, name: &[u8]) -> Result<PathBuf> {
        Ok(join(dir, name))
    }

    fn create(&self, dir: &PathBuf, name: &[u8], mode: u32) -> Result<OwnedFd> {
        let path = join(dir, name);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        at(rustix::fs::openat(&self.root, &path, flags, Mode::from_raw_mode(mode)), "create", &path)
    }

    fn create_empty(&self, dir: &PathBuf, name: &[u8], mode: u32) -> Result<()> {
        self.create(dir, name, mode).map(drop)
    }

    fn open(&self, dir: &PathBuf, name: &[u8], write: bool) -> Result<OwnedFd> {
        let path = join(dir, name);
        let flags = if write { OFlags::RDWR } else { OFlags::RDONLY } | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        at(rustix::fs::openat(&self.root, &path, flags, Mode::empty()), "open", &path)
    }

    fn write(&self, file: &OwnedFd, mut offset: u64, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let count = rustix::io::pwrite(file, data, offset).context("write")?;
            if count == 0 {
                bail!("write wrote nothing");
            }
            offset += count as u64;
            data = &data[count..];
        }
        Ok(())
    }

    fn read(&self, file: &OwnedFd, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < buf.len() {
            match rustix::io::pread(file, &mut buf[filled..], offset + filled as u64).context("read")? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }

    fn fsync(&self, file: &OwnedFd) -> Result<()> {
        rustix::fs::fsync(file).context("fsync")
    }

    fn set_meta(&self, file: &OwnedFd, meta: &Meta) -> Result<()> {
        rustix::fs::futimens(file, &times(meta)).context("futimens")?;
        rustix::fs::fchown(file, Some(Uid::from_raw(meta.uid)), Some(Gid::from_raw(meta.gid))).context("fchown")?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(meta.mode)).context("fchmod")
    }

    fn set_meta_at(&self, dir: &PathBuf, name: &[u8], meta: &Meta, kind: EntryKind) -> Result<()> {
        let path = join(dir, name);
        let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        at(rustix::fs::utimensat(&self.root, &path, &times(meta), nofollow), "utimensat", &path)?;
        at(rustix::fs::chownat(&self.root, &path, Some(uid), Some(gid), nofollow), "fchownat", &path)?;
        if kind == EntryKind::Dir {
            let mode = Mode::from_raw_mode(meta.mode);
            at(rustix::fs::chmodat(&self.root, &path, mode, AtFlags::empty()), "fchmodat", &path)?;
        }
        Ok(())
    }

    fn symlink(&self, dir: &PathBuf, name: &[u8], target: &[u8]) -> Result<()> {
        let path = join(dir, name);
        at(rustix::fs::symlinkat(OsStr::from_bytes(target), &self.root, &path), "symlink", &path)
    }

    fn link(&self, from: (&PathBuf, &[u8]), to: (&PathBuf, &[u8])) -> Result<()> {
        let (from, to) = (join(from.0, from.1), join(to.0, to.1));
        at(rustix::fs::linkat(&self.root, &from, &self.root, &to, AtFlags::empty()), "link", &to)
    }

    fn list(&self, dir: &PathBuf) -> Result<Vec<(Vec<u8>, EntryKind)>> {
        let path = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = at(rustix::fs::openat(&self.root, path, flags, Mode::empty()), "open", path)?;
        let mut names = Vec::new();
        for entry in at(rustix::fs::Dir::new(fd), "list", path)? {
            let entry = at(entry, "list", path)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind =
                if entry.file_type() == rustix::fs::FileType::Directory { EntryKind::Dir } else { EntryKind::Other };
            names.push((name.to_vec(), kind));
        }
        Ok(names)
    }

    fn stat(&self, dir: &PathBuf, name: &[u8]) -> Result<u64> {
        let path = join(dir, name);
        let stat = at(rustix::fs::statat(&self.root, &path, AtFlags::SYMLINK_NOFOLLOW), "stat", &path)?;
        Ok(u64::try_from(stat.st_size).unwrap_or_default())
    }

    fn unlink(&self, dir: &PathBuf, name: &[u8]) -> Result<()> {
        let path = join(dir, name);
        at(rustix::fs::unlinkat(&self.root, &path, AtFlags::empty()), "unlink", &path)
    }

    fn rmdir(&self, dir: &PathBuf, name: &[u8]) -> Result<()> {
        let path = join(dir, name);
        at(rustix::fs::unlinkat(&self.root, &path, AtFlags::REMOVEDIR), "rmdir", &path)
    }

    fn rename(&self, dir: &PathBuf, name: &[u8], new_name: &[u8]) -> Result<()> {
        let (from, to) = (join(dir, name), join(dir, new_name));
        at(rustix::fs::renameat(&self.root, &from, &self.root, &to), "rename", &from)
    }

    fn make_subvolume(&self, dir: &PathBuf, name: &[u8]) -> Result<PathBuf> {
        let path = join(dir, name);
        self.run(&["subvolume", "create"], &[&path])?;
        Ok(path)
    }

    fn snapshot(&self, dir: &PathBuf, source: &[u8], name: &[u8]) -> Result<()> {
        self.run(&["subvolume", "snapshot", "-r"], &[&join(dir, source), &join(dir, name)])
    }

    fn delete_subvolume(&self, dir: &PathBuf, name: &[u8]) -> Result<()> {
        self.run(&["subvolume", "delete"], &[&join(dir, name)])
    }

    fn send(&self, dir: &PathBuf, name: &[u8], parent: Option<&[u8]>, output: &Path) -> Result<()> {
        let parent = parent.map(|parent| self.path.join(join(dir, parent)));
        let mut args: Vec<&OsStr> = vec!["send".as_ref(), "-q".as_ref()];
        args.extend(parent.iter().flat_map(|parent| ["-p".as_ref(), parent.as_os_str()]));
        let snapshot = self.path.join(join(dir, name));
        args.push(snapshot.as_os_str());
        self.run_with(&args, super::open_to_append(output)?)
    }

    fn receive(&self, dir: &PathBuf, stream: &Path) -> Result<()> {
        let into = self.path.join(dir);
        let null = File::options().write(true).open("/dev/null")?;
        self.run_with(&["receive".as_ref(), "-q".as_ref(), "-f".as_ref(), stream.as_os_str(), into.as_os_str()], null)
    }

    fn run_task(&self, what: Admin) -> Result<()> {
        let here = [Path::new("")];
        match what {
            Admin::BalanceMetadata => self.run(&["balance", "start", "-m"], &here),
            Admin::BalanceData => self.run(&["balance", "start", "-d"], &here),
            Admin::ConvertDup => self.run(&["balance", "start", "-dconvert=dup"], &here),
            Admin::EnableQuotas => {
                self.run(&["quota", "enable"], &here)?;
                self.run(&["quota", "rescan", "-w"], &here)
            }
        }
    }

    /// Calls syncfs(2). On a mount of ubtrfs, also asks the mount's server to sync, because syncfs(2) does not reach a
    /// FUSE server (except on mounts of type `fuseblk`).
    fn sync(&self) -> Result<()> {
        rustix::fs::syncfs(self.root.as_fd()).context("syncfs")?;
        match self.channel()? {
            Some(channel) => Ok(channel.sync()?),
            None => Ok(()),
        }
    }
}
