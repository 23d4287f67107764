//! The thread of a run with device changes: it adds, removes and replaces devices while other threads write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use ubtrfs_device::Device;
use ubtrfs_format::DevId;
use ubtrfs_fs::{Fs, Job, ReplaceRequest};

use crate::Rng;

/// Errors of a change that the filesystem does not allow now: EINVAL if too few devices or too little space would be left,
/// ENOSPC, ECANCELED, EBUSY.
const REFUSED: [i32; 4] = [22, 28, 125, 16];

/// Number of tries after which a run without changes ends.
const TRIES_MAX: u64 = 40;

/// Changes the devices of a filesystem until the other threads are done. Devices of `all` that are not part of it are
/// spares. Returns the number of changes.
pub(super) fn change_devices(fs: &Fs, all: &[Arc<dyn Device>], stop: &AtomicBool, seed: u64) -> Result<u64> {
    let mut rng = Rng::new(seed ^ 0xdec1);
    let (mut nr_changes, mut nr_tries) = (0, 0);
    while nr_changes < 3 || !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(rng.below(10)));
        let members = fs.space_usage().devices;
        let is_spare = |device: &&Arc<dyn Device>| {
            !members.iter().any(|member| member.path.as_deref() == Some(device.location().as_str()))
        };
        let spares: Vec<&Arc<dyn Device>> = all.iter().filter(is_spare).collect();
        let devid = members[rng.index(members.len())].devid;
        let done = match (rng.below(3), spares.is_empty()) {
            (0, false) => fs.add_device(Arc::clone(spares[rng.index(spares.len())]), &Job::new()).map(drop),
            (1, false) => {
                let device = Arc::clone(spares[rng.index(spares.len())]);
                let request = ReplaceRequest { devid, device, avoids_source: rng.one_in(4) };
                cancelled_at_times(fs, &mut rng, || fs.replace_device(&request, &Job::new()).map(drop))
            }
            _ => cancelled_at_times(fs, &mut rng, || fs.remove_devices(&[DevId(devid.0)], &Job::new())),
        };
        match done {
            Ok(()) => nr_changes += 1,
            Err(error) if REFUSED.contains(&error.errno()) => {}
            Err(error) => bail!("a change of devices fails: {error}"),
        }
        nr_tries += 1;
        if stop.load(Ordering::SeqCst) && nr_tries > TRIES_MAX {
            break;
        }
    }
    Ok(nr_changes)
}

/// Does work, and cancels it in one of four cases.
fn cancelled_at_times(
    fs: &Fs,
    rng: &mut Rng,
    work: impl FnOnce() -> ubtrfs_fs::Result<()> + Send,
) -> ubtrfs_fs::Result<()> {
    let after = rng.one_in(4).then(|| Duration::from_millis(rng.below(30)));
    std::thread::scope(|scope| {
        let working = scope.spawn(work);
        if let Some(after) = after {
            std::thread::sleep(after);
            let _not_running = fs.cancel_replace().or_else(|_| fs.cancel_removal());
        }
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
