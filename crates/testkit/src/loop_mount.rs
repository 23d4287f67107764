//! Attaches the images of a filesystem to loop devices, and mounts the filesystem with Linux. The loop devices and the
//! mount point are released on drop.
//!
//! I1. A [`LoopMount`] owns its mount point and its loop devices. Dropping the value unmounts the filesystem, then
//!     detaches the loop devices.
//! I2. Linux and btrfs-progs find the members of an array by their fsid. So the images of one fsid are attached only
//!     once at a time ([`ArrayLock`]).

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::QuotaNumbers;
use crate::command::run;

/// A loop device over an image, detached on drop.
#[derive(Debug)]
pub struct LoopDevice(String);

impl LoopDevice {
    /// Attaches a loop device to the image or block device.
    pub fn over(image: &Path) -> Result<Self> {
        // Retry, because another process may take the free loop device after `losetup` found it and before `losetup`
        // attaches it.
        let mut last = None;
        for _ in 0..20 {
            match run("losetup", ["-f".as_ref(), "--show".as_ref(), image.as_os_str()]) {
                Ok(text) => return Ok(Self(text.trim().to_owned())),
                Err(error) => last = Some(error),
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        Err(last.context("I1: the loop runs at least once")?.context("no loop device"))
    }

    /// The path of the device.
    pub fn path(&self) -> &str {
        &self.0
    }

    fn detach(&mut self) -> Result<()> {
        let device = std::mem::take(&mut self.0);
        if device.is_empty() {
            return Ok(());
        }
        // Linux remembers the device of every btrfs that it has seen. Make Linux forget this device, because another
        // filesystem may use the loop device later.
        let _ = run("btrfs", ["device", "scan", "--forget", &device]);
        let backing = Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("loop/backing_file");
        let image = std::fs::read(&backing).ok();
        run("losetup", ["-d", &device])?;
        // Linux detaches the image when the last process has closed the device, and btrfs-progs opens all block devices
        // while it looks for the members of an array.
        for _ in 0..400 {
            if image.is_none() || std::fs::read(&backing).ok() != image {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            eprintln!("detaching a loop device: {error:#}");
        }
    }
}

/// The only array of an fsid that this process has attached (I2). Others wait until it is dropped.
#[derive(Debug)]
struct ArrayLock([u8; 16]);

static ATTACHED: (Mutex<Option<HashSet<[u8; 16]>>>, Condvar) = (Mutex::new(None), Condvar::new());

impl ArrayLock {
    /// Waits for the lock of the filesystem of this image.
    fn of(image: &Path) -> Result<Self> {
        const FSID_AT: u64 = (64 << 10) + 32;
        let mut fsid = [0; 16];
        std::fs::File::open(image)?.read_exact_at(&mut fsid, FSID_AT)?;
        let (mutex, freed) = &ATTACHED;
        let mut attached = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while !attached.get_or_insert_default().insert(fsid) {
            attached = freed.wait(attached).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(Self(fsid))
    }
}

impl Drop for ArrayLock {
    fn drop(&mut self) {
        let (mutex, freed) = &ATTACHED;
        mutex.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().remove(&self.0);
        freed.notify_all();
    }
}

/// The images of an array on loop devices, which Linux knows as one filesystem. Detached on drop.
#[derive(Debug)]
pub struct LoopArray {
    // Dropped before the lock.
    devices: Vec<LoopDevice>,
    _lock: ArrayLock,
}

impl LoopArray {
    /// Attaches images of one filesystem. Images that are not given are missing.
    pub fn over(images: &[impl AsRef<Path>]) -> Result<Self> {
        let first = images.first().context("an array has a member")?;
        let lock = ArrayLock::of(first.as_ref())?;
        let devices: Vec<LoopDevice> =
            images.iter().map(|image| LoopDevice::over(image.as_ref())).collect::<Result<_>>()?;
        let array = Self { devices, _lock: lock };
        run("btrfs", [&["device", "scan"], &array.paths()[..]].concat())?;
        Ok(array)
    }

    /// The paths of the devices, in the order of the images.
    pub fn paths(&self) -> Vec<&str> {
        self.devices.iter().map(LoopDevice::path).collect()
    }
}

/// Makes Linux forget all devices that are not mounted.
///
/// After a degraded mount, Linux also remembers the missing devices of the filesystem, which have no path. If an image
/// of another time of the same filesystem has a different device with such a number, Linux has two devices of one number
/// in its list: it refuses to mount, or turns the filesystem read-only when it writes the superblocks.
pub(crate) fn forget_unmounted_devices() -> Result<()> {
    run("btrfs", ["device", "scan", "--forget"]).map(drop)
}

/// The text in the kernel's log about a transaction that Linux aborted because it found no space.
pub(crate) const NO_SPACE_IN_LOG: &str = "errno=-28 No space left";

/// A mounted image, or a mounted array of images.
#[derive(Debug)]
pub struct LoopMount {
    dir: Option<TempDir>,
    devices: Vec<LoopDevice>,
    lock: Option<ArrayLock>,
    mounted: bool,
    is_degraded: bool,
    log_mark: Option<f64>,
}

impl LoopMount {
    /// Mounts the image as btrfs with these `-o` options ("" for none).
    pub fn new(image: &Path, options: &str) -> Result<Self> {
        Self::mount(vec![LoopDevice::over(image)?], None, options, image)
    }

    /// Mounts an array of images with these `-o` options ("" for none). Images that are not given are missing.
    pub fn array(images: &[impl AsRef<Path>], options: &str) -> Result<Self> {
        let LoopArray { devices, _lock: lock } = LoopArray::over(images)?;
        let first = images.first().context("an array has a member")?;
        // Another process may make Linux forget the devices after the scan, so name them to mount(2) again.
        let named = devices.iter().map(|device| format!("device={}", device.path()));
        let options: Vec<String> = named.chain((!options.is_empty()).then(|| options.to_owned())).collect();
        Self::mount(devices, Some(lock), &options.join(","), first.as_ref())
    }

    fn mount(devices: Vec<LoopDevice>, lock: Option<ArrayLock>, options: &str, image: &Path) -> Result<Self> {
        let is_degraded = options.split(',').any(|option| option == "degraded");
        let log_mark = uptime_seconds();
        let mut mount = Self { dir: None, devices, lock, mounted: false, is_degraded, log_mark };
        let dir = TempDir::with_prefix("ubtrfs-kernel-mount-")?;
        let point = dir.path().to_string_lossy().into_owned();
        mount.dir = Some(dir);
        let mut args = vec!["-t", "btrfs"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        args.extend([mount.device(), point.as_str()]);
        if let Err(error) = run("mount", args) {
            let log = mount.kernel_log();
            return Err(error.context(format!("Linux did not mount {}:\n{log}", image.display())));
        }
        mount.mounted = true;
        Ok(mount)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.dir.as_ref().map_or(Path::new("/nonexistent"), TempDir::path)
    }

    /// A path below the mount point.
    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        self.path().join(path)
    }

    /// The first loop device.
    pub fn device(&self) -> &str {
        self.devices.first().map_or("", LoopDevice::path)
    }

    /// Scrubs the filesystem with Linux. Fails unless the scrub ends without errors.
    pub fn scrub(&self) -> Result<()> {
        let point = self.path().to_string_lossy().into_owned();
        let text = run("btrfs", ["scrub", "start", "-B", &point])?;
        if !text.contains("no errors found") {
            bail!("scrub found errors:\n{text}\n{}", self.kernel_log());
        }
        Ok(())
    }

    /// Turns quotas on, and returns when Linux has finished counting.
    ///
    /// Linux may miss data that is written while it counts, without marking its numbers as inconsistent. Such losses
    /// were seen with Linux 6.18 on about one in fifty images; `btrfs check` also reports such wrong numbers.
    pub fn enable_quota(&self) -> Result<()> {
        let point = self.path().to_string_lossy().into_owned();
        run("btrfs", ["filesystem", "sync", &point])?;
        run("btrfs", ["quota", "enable", &point])?;
        run("btrfs", ["quota", "rescan", "-w", &point]).map(drop)
    }

    /// Waits until no balance runs. Linux resumes an interrupted balance when it mounts.
    pub fn finish_balance(&self) -> Result<()> {
        let point = self.path().to_string_lossy().into_owned();
        for _ in 0..3000 {
            // While a balance exists, the exit status is 1, so `run` returns an error.
            match run("btrfs", ["balance", "status", &point]) {
                Ok(text) if text.contains("No balance found") => return Ok(()),
                _ => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        }
        bail!("the balance does not end:\n{}", self.kernel_log())
    }

    /// The quota numbers that Linux shows, and whether it marks them as inconsistent. `None` if quotas are off.
    pub fn quota_numbers(&self) -> Result<Option<(QuotaNumbers, bool)>> {
        let point = self.path().to_string_lossy().into_owned();
        run("btrfs", ["filesystem", "sync", &point])?;
        let Some(is_inconsistent) = self.quota_state("inconsistent") else { return Ok(None) };
        let text = run("btrfs", ["qgroup", "show", "--raw", "--sync", &point])?;
        let mut numbers = QuotaNumbers::new();
        for line in text.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_digit())) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [id, referenced, exclusive, ..] = words[..] else { bail!("{line}") };
            numbers.insert(id.to_owned(), (referenced.parse()?, exclusive.parse()?));
        }
        Ok(Some((numbers, is_inconsistent != "0")))
    }

    /// Returns the content of a file about quotas in sysfs; `None` if quotas are off.
    fn quota_state(&self, name: &str) -> Option<String> {
        let device = self.device().trim_start_matches("/dev/");
        let mut filesystems = std::fs::read_dir("/sys/fs/btrfs").ok()?.flatten().map(|entry| entry.path());
        let own = filesystems.find(|path| path.join("devices").join(device).exists())?;
        Some(std::fs::read_to_string(own.join("qgroups").join(name)).ok()?.trim().to_owned())
    }

    /// Makes Linux compute the numbers of all quota groups again.
    pub fn rescan_quotas(&self) -> Result<()> {
        run("btrfs", ["quota", "rescan", "-w", &self.path().to_string_lossy()]).map(drop)
    }

    /// Waits until Linux has completed the deletions of subvolumes, but at most about 20 seconds, and not after an
    /// abort, after which Linux never completes them.
    ///
    /// A sync wakes Linux's cleaner. Without a sync, a cleaner that began before the end of the mount sleeps until the
    /// next commit, up to half a minute later.
    fn finish_deletions(&self) {
        let point = self.path().to_string_lossy().into_owned();
        for _ in 0..10 {
            let synced = run("btrfs", ["filesystem", "sync", &point]);
            if synced.is_err() || run("timeout", ["2", "btrfs", "subvolume", "sync", "-s", "1", &point]).is_ok() {
                return;
            }
        }
    }

    /// Makes Linux compute all quota numbers again. Fails if the numbers change, unless they were marked as
    /// inconsistent. Returns whether quotas are on.
    ///
    /// First, Linux completes deletions of subvolumes, because it removes the group of a subvolume at the end of the
    /// subvolume's deletion.
    pub fn judge_quotas(&self) -> Result<bool> {
        self.finish_deletions();
        let Some((before, is_inconsistent)) = self.quota_numbers()? else { return Ok(false) };
        self.rescan_quotas()?;
        let (after, _) = self.quota_numbers()?.unwrap_or_default();
        ensure!(is_inconsistent || before == after, "Linux's rescan changes quota numbers: {before:?} to {after:?}");
        Ok(true)
    }

    /// The kernel's log about these devices since the mount (empty if the log cannot be read).
    pub fn kernel_log(&self) -> String {
        let Ok(text) = run("dmesg", std::iter::empty::<&str>()) else { return String::new() };
        let names: Vec<&str> = self.devices.iter().map(|device| device.path().trim_start_matches("/dev/")).collect();
        let since = self.log_mark.unwrap_or(0.0);
        text.lines()
            .filter(|line| line.contains("BTRFS") && names.iter().any(|name| is_about(line, name)))
            .filter(|line| log_seconds(line).is_none_or(|at| at >= since))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Whether Linux made the filesystem read-only because a transaction found no space.
    pub fn ran_out_of_space(&self) -> bool {
        self.kernel_log().lines().any(|line| line.contains("BTRFS: error") && line.contains(NO_SPACE_IN_LOG))
    }

    /// Lines of the kernel's log about these devices that are warnings or worse.
    pub fn kernel_complaints(&self) -> Vec<String> {
        self.kernel_log()
            .lines()
            .filter(|line| ["BTRFS warning", "BTRFS error", "BTRFS critical"].iter().any(|tag| line.contains(tag)))
            // Ignore warnings about deprecated options, and about an outdated free space cache: a writer that does not
            // maintain the cache leaves it outdated, and Linux warns about that at mount.
            .filter(|line| !line.contains("space cache generation") && !line.contains("is being deprecated"))
            // Ignore a failed scan of the UUID tree: if Linux commits while it mounts, it counts the UUID tree as
            // outdated and scans for missing entries. The scan needs space even if the UUID tree has all entries, so it
            // fails with ENOSPC on a full filesystem. The next mount scans again. Seen with Linux 6.18 on images whose
            // UUID tree was current.
            .filter(|line| !line.contains("btrfs_uuid_scan_kthread failed -28"))
            // Also ignore a failed rescan of quotas: Linux continues an interrupted rescan at mount and records the
            // rescan's progress in the quota tree, which also fails with ENOSPC on a full filesystem.
            .filter(|line| !line.contains("fail to start transaction for status update: -28"))
            // With the option `degraded`, Linux names the missing devices.
            .filter(|line| !(self.is_degraded && line.contains(" is missing")))
            // Also ignore one read past the end of a leaf: when Linux replays a log, it reads 53 bytes of the inline
            // extent that the log replaces, although an inline extent may be shorter, and gets zeros (seen with Linux
            // 6.18).
            .filter(|line| !(line.contains("access to eb bytenr") && line.ends_with("len 53")))
            .map(str::to_owned)
            .collect()
    }

    /// Unmounts and detaches. If both steps fail, returns the error of the first one.
    pub fn close(mut self) -> Result<()> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<()> {
        let mut result = Ok(());
        if self.mounted {
            self.mounted = false;
            let point = self.path().to_string_lossy().into_owned();
            result = run("umount", [&point]).map(drop);
            if result.is_err() {
                let _ = run("umount", ["-l", &point]);
            }
        }
        for device in &mut self.devices {
            result = result.and(device.detach());
        }
        self.lock = None;
        result
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            eprintln!("cleaning up a loop mount: {error:#}");
        }
    }
}

/// Whether this line of the kernel's log is about this device. `loop1` is not `loop10`.
fn is_about(line: &str, device: &str) -> bool {
    line.match_indices("device ").any(|(at, tag)| {
        let rest = line[at..].strip_prefix(tag).and_then(|rest| rest.strip_prefix(device));
        rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_alphanumeric()))
    })
}

fn uptime_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    text.split(' ').next()?.parse().ok()
}

fn log_seconds(line: &str) -> Option<f64> {
    line.strip_prefix('[')?.split(']').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::is_about;

    #[test]
    fn a_line_about_another_device_whose_name_begins_equally_is_ignored() {
        let line = "[ 9.5] BTRFS error (device loop10 state EA): relocation of device loop2 failed";
        assert!(!is_about(line, "loop1"));
        assert!(is_about(line, "loop10"));
        assert!(is_about(line, "loop2"));
        assert!(is_about("[ 9.5] BTRFS info (device loop1): first mount", "loop1"));
    }
}
