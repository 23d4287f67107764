//! [`LentDevice`]: a block device whose exclusive claim belongs to the kernel's mount of type `fuseblk`.
//!
//! ```text
//! lent --DESTROY: closed--> done
//!   |
//!   +-- the connection ends otherwise (umount -f, an abort) --> writes wait --claimed again--> writes run
//!                                                                           --taken by others--> writes fail for ever
//! ```
//!
//! D1. After the connection has ended, nothing is written to the device until this process or its helper has the claim
//!     again, or keeps the mount that has it. If another program took the device, nothing is written any more, and the
//!     session reports the changes as lost.
//! D2. The claim stays with this process or its helper until the filesystem is closed.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_device::{Device, claim_block_device};
use ubtrfs_fs::Fs;

use crate::mount_table::{self, MountInfo};
use crate::sandbox::PrivilegedHelper;

#[derive(Debug)]
pub(crate) struct LentDevice {
    device: Arc<dyn Device>,
    place: LentPlace,
    state: Mutex<LentState>,
}

/// The device.
#[derive(Clone, Debug)]
pub(crate) struct LentPlace {
    pub(crate) device: PathBuf,
    pub(crate) rdev: u64,
}

#[derive(Debug)]
enum LentState {
    Lent,
    /// The filesystem is closed, or the attempt to take the claim again has ended. The file has the claim, or keeps the
    /// mount that has it. There is no file if the helper process has the claim, or if the claim is lost
    /// or no longer needed.
    Decided {
        _held: Option<File>,
    },
}

impl LentDevice {
    /// Makes the value for a `device` that will be mounted.
    pub(crate) fn new(device: Arc<dyn Device>) -> io::Result<Self> {
        let path = PathBuf::from(device.location());
        let place = LentPlace { rdev: std::fs::metadata(&path)?.rdev(), device: path };
        Ok(Self { device, place, state: Mutex::new(LentState::Lent) })
    }

    pub(crate) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Notes that the filesystem was closed while the kernel had the claim, so this process need not take the claim
    /// again.
    pub(crate) fn closed(&self) {
        let mut state = self.state.lock();
        if matches!(*state, LentState::Lent) {
            *state = LentState::Decided { _held: None };
        }
    }

    /// Takes the claim again (D1), unless the filesystem was closed. A confined server cannot open the device, so its
    /// helper does.
    pub(crate) fn reclaim(&self, fs: &Fs, helper: Option<&PrivilegedHelper>) {
        let mut state = self.state.lock();
        if !matches!(*state, LentState::Lent) {
            return;
        }
        self.device.pause_writes();
        let taken = match helper {
            Some(helper) => helper.take_device(self.place.rdev).map(|()| None),
            None => self.place.take().map(Some),
        };
        match taken {
            Ok(held) => {
                *state = LentState::Decided { _held: held };
                self.device.resume_writes(true);
            }
            Err(error) => {
                *state = LentState::Decided { _held: None };
                crate::session::abort(fs, &self.loss(fs, &error));
                self.device.resume_writes(false);
            }
        }
    }

    fn loss(&self, fs: &Fs, error: &io::Error) -> String {
        let (device, generation) = (self.place.device.display(), fs.superblock().generation);
        format!(
            "the mount ended by umount -f or an abort, and {device} could not be claimed again ({error}), because another \
             program uses it: nothing more is written to it, and all changes after the commit of generation {generation} \
             are lost"
        )
    }
}

impl LentPlace {
    /// Claims the device, or keeps the mount that still has the claim.
    pub(crate) fn take(&self) -> io::Result<File> {
        let until = Instant::now() + PATIENCE;
        loop {
            match claim_block_device(&self.device, self.rdev) {
                // The kernel may still be giving up its claim.
                Err(error) if is_busy(&error) && Instant::now() < until => std::thread::sleep(PAUSE),
                Err(error) if is_busy(&error) => return self.keep_mount().ok_or(error),
                done => return done,
            }
        }
    }

    /// Opens the mount point of a mount, without a request to the server. While the returned file is open, the mount and its
    /// claim on the device stay. Returns `None` if no mount is left. Call this function only after [`PATIENCE`], because the
    /// open file would make a running umount(2) fail.
    fn keep_mount(&self) -> Option<File> {
        let flags = i32::try_from((OFlags::PATH | OFlags::DIRECTORY).bits()).ok()?;
        let is_ours = |mount: &MountInfo| {
            mount.kind.starts_with("fuseblk.") && mount.is_of_ubtrfs() && mount.device_number() == Some(self.rdev)
        };
        // The mount may be another one than the first.
        mount_table::mounts().into_iter().filter(is_ours).find_map(|mount| {
            let file = File::options().read(true).custom_flags(flags).open(&mount.dir).ok()?;
            mount_table::find_mount(&mount.dir).is_some_and(|top| top.id == mount.id).then_some(file)
        })
    }
}

fn is_busy(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::BUSY)
}

/// How long to wait for the kernel to give up its claim. Without open files in the mount, this takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);
