//! Tests of root's mounts of block devices with the option `fuseblk`: sync(2) reaches the server, and umount(2) waits for
//! the last commit.
//!
//! Method: a loop device over an image. After a sync or an unmount, a copy of the image is judged by Linux. The mount
//! commits by itself only after a second without changes. The copy is made earlier, so it shows the effect of the sync
//! or the unmount.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::mount::UnmountFlags;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle() && capability::program("losetup")
}

fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Output {
    let output = Command::new(program).args(args).env("LC_ALL", "C").output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program}: {text}");
    output
}

/// A loop device over a new image, mounted by the program.
struct Bed {
    image: Image,
    device: String,
    dir: TempDir,
}

impl Bed {
    fn new() -> Self {
        let image = Image::kernel_made(256 << 20, &[]).unwrap();
        let output = run("losetup", ["-f".as_ref(), "--show".as_ref(), image.path().as_os_str()]);
        let device = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        let bed = Self { image, device, dir: TempDir::with_prefix("ubtrfs-block-").unwrap() };
        bed.mount("commit=300,fuseblk");
        bed
    }

    fn mount(&self, options: &str) {
        let dir = self.dir.path().as_os_str();
        run(UBTRFS, ["mount".as_ref(), "-o".as_ref(), options.as_ref(), self.device.as_ref(), dir]);
    }

    fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The type of the mount.
    fn kind(&self) -> Option<String> {
        let table = fs::read_to_string("/proc/self/mounts").unwrap();
        let dir = self.dir.path().to_string_lossy().into_owned();
        let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        table.lines().map(fields).find(|fields| fields[1] == dir).map(|fields| fields[2].clone())
    }

    /// Copies the image, and returns what Linux reads from a file in the copy.
    fn on_disk(&self, name: &str) -> Option<Vec<u8>> {
        let copy = Image::empty(0).unwrap();
        fs::copy(self.image.path(), copy.path()).unwrap();
        btrfs_check(copy.path()).unwrap();
        let theirs = LoopMount::new(copy.path(), "ro").unwrap();
        let content = fs::read(theirs.join(name)).ok();
        theirs.close().unwrap();
        content
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
        let _ = Command::new("losetup").args(["-d", &self.device]).output();
    }
}

/// Claims a block device as mkfs and mount do.
fn claim(device: &str) -> std::io::Result<fs::File> {
    const O_EXCL: i32 = 0o200;
    fs::File::options().read(true).custom_flags(O_EXCL).open(Path::new(device))
}

#[test]
fn sync_and_umount_of_a_block_device_wait_for_the_commit() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    assert_eq!(bed.kind().as_deref(), Some("fuseblk.ubtrfs"));
    assert!(claim(&bed.device).is_err(), "the kernel holds the device for the mount");

    fs::write(bed.join("synced"), b"by syncfs").unwrap();
    rustix::fs::syncfs(fs::File::open(bed.dir.path()).unwrap()).unwrap();
    assert_eq!(bed.on_disk("synced").as_deref(), Some(&b"by syncfs"[..]));

    fs::write(bed.join("synced"), b"by sync").unwrap();
    rustix::fs::sync();
    assert_eq!(bed.on_disk("synced").as_deref(), Some(&b"by sync"[..]));

    fs::write(bed.join("last"), vec![b'x'; 5_000_000]).unwrap();
    // Plain umount(2), without the program.
    rustix::mount::unmount(bed.dir.path(), UnmountFlags::NOFOLLOW).unwrap();
    assert_eq!(bed.on_disk("last").unwrap().len(), 5_000_000);
    drop(claim(&bed.device).unwrap());

    // The server may not have ended yet; a new mount waits for its end.
    bed.mount("ro");
    assert_eq!(bed.kind().as_deref(), Some("fuse.ubtrfs"), "several read-only mounts may share a device");
    assert_eq!(fs::read(bed.join("synced")).unwrap(), b"by sync");
    run(UBTRFS, ["umount".as_ref(), bed.dir.path().as_os_str()]);
}

#[test]
fn a_block_device_is_mounted_again_after_every_end() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    fs::write(bed.join("file"), b"1").unwrap();
    run(UBTRFS, ["umount".as_ref(), bed.dir.path().as_os_str()]);
    assert_eq!((bed.kind(), bed.on_disk("file").as_deref()), (None, Some(&b"1"[..])));

    bed.mount("commit=300,fuseblk");
    fs::write(bed.join("file"), b"2").unwrap();
    let refused = Command::new(UBTRFS).args(["ls", &format!("{}:/", bed.device)]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("ubtrfs umount"), "{said}");
    rustix::fs::sync();
    let server = server_of(bed.dir.path());
    run("kill", ["-KILL", &server]);
    rustix::mount::unmount(bed.dir.path(), UnmountFlags::DETACH).unwrap();
    bed.mount("commit=300,fuseblk");
    assert_eq!(fs::read(bed.join("file")).unwrap(), b"2", "it was synced before the server was killed");

    fs::write(bed.join("file"), b"3").unwrap();
    // The server unmounts itself.
    run("kill", ["-TERM", &server_of(bed.dir.path())]);
    for _ in 0..200 {
        if bed.kind().is_none() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    bed.mount("noio_uring");
    assert_eq!(fs::read(bed.join("file")).unwrap(), b"3");
    let dir = bed.dir.path().as_os_str();
    run(UBTRFS, ["mount".as_ref(), "-o".as_ref(), "remount,ro".as_ref(), bed.device.as_ref(), dir]);
    assert!(fs::write(bed.join("file"), b"4").is_err());
    rustix::mount::unmount(bed.dir.path(), UnmountFlags::NOFOLLOW).unwrap();
    assert_eq!(bed.on_disk("file").as_deref(), Some(&b"3"[..]));
}

/// Finds the server of a mount: the process whose arguments end with the mount point.
fn server_of(dir: &Path) -> String {
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        if words.contains(&&b"--serve"[..]) && words.contains(&dir.as_os_str().as_encoded_bytes()) {
            return entry.file_name().into_string().unwrap();
        }
    }
    panic!("no server for {}", dir.display());
}
