//! Mounting again what is mounted, for changes that a server cannot make while it runs: it cannot write after it was opened
//! for reading, nor serve the new filesystem that was made on its seed.
//!
//! A1. What is in use, or mounted in several places, stays mounted as it is: unmounting is never forced.
//! A2. If the new mount fails, the old one is made again.
//! A3. The new mount has the options, flags, subvolume and confinement of the old one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};
use ubtrfs_control::{Channel, Request, Response, filesystem};
use ubtrfs_fuse::{MountError, Mounted};

use super::{given_at_mount, subvolume_at};
use crate::common::Shown;

/// What is needed to mount again.
pub(crate) struct MountAgain {
    dir: PathBuf,
    device: PathBuf,
    /// The options, without `ro` and `rw`.
    options: Vec<String>,
    /// The other devices.
    others: Vec<PathBuf>,
    is_confined: bool,
}

impl MountAgain {
    /// Looks at a mount. Nothing changes.
    ///
    /// # Errors
    ///
    /// Another user made the mount, it is one of several of its filesystem, it shows no subvolume, or its server does not
    /// answer.
    pub(crate) fn look(mounted: &Mounted) -> anyhow::Result<Self> {
        let dir = mounted.dir.shown();
        if let Some(uid) = mounted.other_user {
            bail!("user {uid} mounted {dir}; do it as that user");
        }
        if let Some(other) = mounted.others().into_iter().next() {
            bail!("{dir} is also mounted on {}; unmount that first", other.shown());
        }
        let unknown = || anyhow!("{dir}: its server does not tell how it was mounted; unmount it and mount it again");
        let given = given_at_mount(&mounted.dir).ok_or_else(unknown)?;
        let subvolume = subvolume_at(&mounted.dir).with_context(|| format!("{dir} shows only part of a subvolume"))?;
        let channel = Channel::mount(&mounted.dir)?;
        let Response::Filesystem(filesystem::Response::Usage(usage)) =
            channel.call(Request::Filesystem(filesystem::Request::Usage), &[])?
        else {
            return Err(unknown());
        };
        let is_kept = |option: &&str| {
            !matches!(*option, "" | "ro" | "rw")
                && !["subvol=", "subvolid=", "device="].iter().any(|prefix| option.starts_with(prefix))
        };
        let given = given.iter().flat_map(|list| list.split(',')).filter(is_kept).map(str::to_owned);
        let config = &mounted.config;
        let flags = [
            (config.nodev, "nodev", "dev"),
            (config.nosuid, "nosuid", "suid"),
            (config.noexec, "noexec", "exec"),
            (config.noatime, "noatime", "atime"),
        ];
        let flags = flags.map(|(is_set, on, off)| if is_set { on } else { off }.to_owned());
        let options = given.chain(flags).chain([format!("subvolid={}", subvolume.id)]).collect();
        let device = mounted.source();
        let paths = usage.devices.into_iter().filter_map(|found| found.path).map(PathBuf::from);
        let others = paths.filter(|path| path.is_absolute() && *path != device).collect();
        let is_confined = channel.server().is_some_and(is_confined);
        Ok(Self { dir: mounted.dir.clone(), device, options, others, is_confined })
    }

    /// Mounts the same filesystem for writing.
    ///
    /// # Errors
    ///
    /// As for [`Self::by_device`].
    pub(crate) fn writable(&self) -> anyhow::Result<()> {
        self.by(&self.device, &self.others, "rw")
    }

    /// Mounts the new filesystem on the seed that is mounted, for reading, as Linux shows it after that.
    ///
    /// # Errors
    ///
    /// It is in use (A1), or cannot be mounted (A2).
    pub(crate) fn by_device(&self, device: &Path) -> anyhow::Result<()> {
        let seeds: Vec<PathBuf> = std::iter::once(&self.device).chain(&self.others).cloned().collect();
        self.by(device, &seeds, "ro")
    }

    fn by(&self, device: &Path, others: &[PathBuf], access: &str) -> anyhow::Result<()> {
        let dir = self.dir.shown();
        match ubtrfs_fuse::unmount(&self.dir, false) {
            Err(MountError::Busy(_)) => {
                bail!("{dir} is in use; end the programs that use it, then unmount and mount it")
            }
            unmounted => unmounted?,
        }
        if self.mount(device, others, access)? {
            return Ok(());
        }
        match self.mount(&self.device, &self.others, "ro")? {
            true => bail!("{dir} is mounted as before"),
            false => bail!("{dir} is not mounted any more"),
        }
    }

    /// Mounts. The command has printed why if it returns false.
    fn mount(&self, device: &Path, others: &[PathBuf], access: &str) -> anyhow::Result<bool> {
        let program = std::env::current_exe().context("cannot find this program to mount again")?;
        let mut command = Command::new(program);
        command.arg("mount");
        for option in self.options.iter().map(String::as_str).chain([access]) {
            command.args(["-o", option]);
        }
        for other in others.iter().filter_map(|other| other.to_str()).filter(|other| !other.contains(',')) {
            command.arg("-o").arg(format!("device={other}"));
        }
        command.arg(if self.is_confined { "--sandbox" } else { "--no-sandbox" });
        let status = command.arg("--").arg(device).arg(&self.dir).status();
        Ok(status.context("cannot start this program to mount again")?.success())
    }
}

/// Whether a server gave up its rights: it has a filter of system calls.
fn is_confined(server: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{server}/status")).unwrap_or_default();
    status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]))
}
