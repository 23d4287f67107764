//! Two equal filesystems side by side: one mounted by `ubtrfs`, one by Linux.
//!
//! P1. Both images are made by `mkfs.btrfs` with the same options.
//! P2. Mounts are unmounted on drop, also after a panic.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::observe::{Entry, walk};
use super::perform::Side;
use crate::{Image, LoopMount, btrfs_check};

/// The parameters of making and mounting a pair.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The program `ubtrfs`, in a place that all users may enter.
    pub program: PathBuf,
    /// Mount options of `ubtrfs` besides `noatime`; "" for none.
    pub ubtrfs_options: String,
    /// Linux's mount options besides `noatime`; "" for none.
    pub linux_options: String,
    /// Arguments of `mkfs.btrfs`.
    pub mkfs: Vec<String>,
    /// Whether to print each kind of difference once and continue, instead of failing. Later differences may be
    /// consequences of earlier ones.
    pub survey: bool,
}

impl Setup {
    /// Makes the default setup with this program.
    pub fn new(program: &Path) -> Self {
        Self {
            program: program.to_owned(),
            ubtrfs_options: String::new(),
            linux_options: String::new(),
            mkfs: Vec::new(),
            survey: false,
        }
    }
}

/// The size of the images.
const IMAGE_BYTES: u64 = 1 << 30;

/// A mounted pair.
pub struct Pair {
    setup: Setup,
    our_image: Image,
    linux_image: Image,
    our_mount: Option<FuseMount>,
    linux_mount: Option<LoopMount>,
    pub(crate) ours: Arc<Mutex<Side>>,
    pub(crate) linux: Arc<Mutex<Side>>,
}

impl Pair {
    /// Makes a new, empty pair.
    pub fn new(setup: &Setup) -> Result<Self> {
        let args: Vec<&str> = setup.mkfs.iter().map(String::as_str).collect();
        let mut pair = Self {
            setup: setup.clone(),
            our_image: Image::kernel_made(IMAGE_BYTES, &args)?,
            linux_image: Image::kernel_made(IMAGE_BYTES, &args)?,
            our_mount: None,
            linux_mount: None,
            ours: Arc::new(Mutex::new(Side::new(Path::new("/nonexistent")))),
            linux: Arc::new(Mutex::new(Side::new(Path::new("/nonexistent")))),
        };
        pair.mount()?;
        Ok(pair)
    }

    fn mount(&mut self) -> Result<()> {
        let our_mount = FuseMount::new(&self.setup, self.our_image.path())?;
        let mut options = "noatime".to_owned();
        if !self.setup.linux_options.is_empty() {
            options = format!("{options},{}", self.setup.linux_options);
        }
        let linux_mount = LoopMount::new(self.linux_image.path(), &options)?;
        *lock(&self.ours) = Side::new(our_mount.dir.path());
        lock(&self.ours).snapshots_by = Some(self.setup.program.clone());
        *lock(&self.linux) = Side::new(linux_mount.path());
        self.our_mount = Some(our_mount);
        self.linux_mount = Some(linux_mount);
        Ok(())
    }

    fn unmount(&mut self) -> Result<()> {
        for side in [&self.ours, &self.linux] {
            let mut side = lock(side);
            side.slots.fill_with(|| None);
            side.helpers.clear();
        }
        let ours = self.our_mount.take().map_or(Ok(()), FuseMount::close);
        let linux = match self.linux_mount.take() {
            None => Ok(()),
            Some(mount) => {
                let complaints = mount.kernel_complaints();
                mount.close().and_then(|()| {
                    ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
                    Ok(())
                })
            }
        };
        ours.and(linux)
    }

    /// Unmounts both sides and mounts them again.
    pub(crate) fn remount(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    /// Unmounts both sides and mounts them with exchanged images.
    pub(crate) fn swap(&mut self) -> Result<()> {
        self.unmount()?;
        std::mem::swap(&mut self.our_image, &mut self.linux_image);
        self.mount()
    }

    /// Makes all changes on both sides durable.
    pub(crate) fn sync(&self) -> Result<()> {
        if let Some(mount) = &self.our_mount {
            program(&self.setup.program, ["sync".as_ref(), mount.dir.path().as_os_str()])?;
        }
        if let Some(mount) = &self.linux_mount {
            rustix::fs::syncfs(std::fs::File::open(mount.path())?)?;
        }
        Ok(())
    }

    /// Returns all entries of both sides: first those of our mount, then those of Linux's.
    pub(crate) fn walk(&self) -> Result<(Vec<Entry>, Vec<Entry>)> {
        let ours = lock(&self.ours).root.clone();
        let linux = lock(&self.linux).root.clone();
        Ok((walk(&ours).context("our mount")?, walk(&linux).context("Linux's mount")?))
    }

    /// Scrubs the filesystem that Linux has mounted, unmounts both sides, and checks both images with btrfs-progs and
    /// with our checker.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if let Some(mount) = &self.linux_mount {
            mount.scrub()?;
        }
        self.unmount()?;
        for (image, name) in [(&self.our_image, "our image"), (&self.linux_image, "Linux's image")] {
            btrfs_check(image.path()).with_context(|| format!("btrfs check of {name}"))?;
            program(&self.setup.program, ["check".as_ref(), image.path().as_os_str()])
                .with_context(|| format!("ubtrfs check of {name}"))?;
        }
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            eprintln!("unmounting a pair: {error:#}");
        }
    }
}

/// Locks a side. A side stays usable after a panic of a thread that held the lock.
pub(crate) fn lock(side: &Mutex<Side>) -> std::sync::MutexGuard<'_, Side> {
    side.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

struct FuseMount {
    program: PathBuf,
    dir: TempDir,
    mounted: bool,
}

impl FuseMount {
    fn new(setup: &Setup, image: &Path) -> Result<Self> {
        let dir = TempDir::with_prefix("ubtrfs-pair-")?;
        let mut options = "allow_other,default_permissions,noatime".to_owned();
        if !setup.ubtrfs_options.is_empty() {
            options = format!("{options},{}", setup.ubtrfs_options);
        }
        let args = ["mount".as_ref(), "-o".as_ref(), OsStr::new(&options), image.as_os_str(), dir.path().as_os_str()];
        program(&setup.program, args)?;
        Ok(Self { program: setup.program.clone(), dir, mounted: true })
    }

    fn close(mut self) -> Result<()> {
        self.mounted = false;
        program(&self.program, ["umount".as_ref(), self.dir.path().as_os_str()])
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = program(&self.program, ["umount".as_ref(), "-l".as_ref(), self.dir.path().as_os_str()]);
        }
    }
}

/// Runs `ubtrfs`, with a time limit of two minutes.
fn program<'a>(program: &Path, args: impl IntoIterator<Item = &'a OsStr>) -> Result<()> {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120"]).arg(program).args(args).env("LC_ALL", "C").stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
