//! An image that stays open while several commands of this process work on it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::bail;
use ubtrfs_fs::Fs;

use super::is_same_image;
use crate::common::Shown;

/// The image that is held, at most one.
static HELD: Mutex<Option<(PathBuf, Arc<Fs>)>> = Mutex::new(None);

/// Calls `work`, and lets the commands that run in it use `fs` for the image.
pub(crate) fn while_held<T>(image: &Path, fs: &Arc<Fs>, work: impl FnOnce() -> T) -> T {
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            *HELD.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
    *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some((image.to_owned(), Arc::clone(fs)));
    let _release = Release;
    work()
}

/// Fails if another image than this one is held: a change of this one would not be part of its transaction.
pub(super) fn refuse_change_of(image: &Path) -> anyhow::Result<()> {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    match held.as_ref().filter(|(other, _)| !is_same_image(other, image)) {
        Some((other, _)) => {
            bail!("{} is not changed, because an edit changes only {}; edit it by itself", image.shown(), other.shown())
        }
        None => Ok(()),
    }
}

/// The open filesystem of this image, if the image is held.
pub(super) fn held(image: &Path) -> Option<Arc<Fs>> {
    let held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    held.as_ref().filter(|(other, _)| is_same_image(other, image)).map(|(_, fs)| Arc::clone(fs))
}
