//! Tests of root's mounts of block devices with the option `fuseblk`: sync(2) reaches the server, umount(2) waits for
//! the last commit, and after `umount -f` the server writes only to a device that nobody else has taken.
//!
//! Method: each test mounts a loop device over an image, and copies the image after a sync or an unmount. Linux then
//! reads the copy. The mount commits by itself only after a second without changes, and the copy is made before that,
//! so it shows the effect of the sync or the unmount. A test stops the server (SIGSTOP) to simulate a server that waits
//! for a slow disk.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::{ok, refused, server_of, ubtrfs};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopDevice, LoopMount, btrfs_check, capability, run};

const FUSEBLK: &str = "commit=300,fuseblk";

fn ready() -> bool {
    capability::fuse() && capability::kernel_oracle() && capability::program("losetup")
}

/// A loop device over a new image, and a mount point.
struct Bed {
    image: Image,
    device: LoopDevice,
    dir: TempDir,
}

impl Bed {
    fn new() -> Self {
        let image = Image::kernel_made(256 << 20, &[]).unwrap();
        let device = LoopDevice::over(image.path()).unwrap();
        Self { image, device, dir: TempDir::with_prefix("ubtrfs-block-").unwrap() }
    }

    /// The arguments of a mount with these options.
    fn arguments<'a>(&'a self, options: &'a str) -> [&'a OsStr; 5] {
        ["mount".as_ref(), "-o".as_ref(), options.as_ref(), self.device.path().as_ref(), self.dir.path().as_os_str()]
    }

    /// Mounts, as soon as the device is free.
    fn mount(&self, options: &str) {
        self.wait_until_free();
        ok(ubtrfs(self.arguments(options)));
    }

    /// Mounts as soon as the device is free, and returns the server as a child process.
    fn serve(&self, options: &str, flag: &str) -> Child {
        self.wait_until_free();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
        command.args(self.arguments(options)).args(["--foreground", flag]);
        let server = command.env("LC_ALL", "C").stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("the mount works", || self.kind().is_some());
        server
    }

    fn umount(&self) {
        ok(ubtrfs(["umount".as_ref(), self.dir.path().as_os_str()]));
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

    /// Claims the device as mkfs and mount do.
    fn claim(&self) -> std::io::Result<fs::File> {
        const O_EXCL: i32 = 0o200;
        fs::File::options().read(true).custom_flags(O_EXCL).open(Path::new(self.device.path()))
    }

    /// Whether no server has the image or the device open.
    fn is_unlocked(&self) -> bool {
        [self.image.path(), Path::new(self.device.path())].into_iter().all(|path| {
            let file = fs::File::open(path).unwrap();
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        })
    }

    /// A program that another test starts may have descriptors or mounts of this test for a moment.
    #[track_caller]
    fn wait_until_free(&self) {
        wait_until("the device is free", || self.claim().is_ok());
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
    }
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..3000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("not within a minute: {what}");
}

fn force(dir: &Path) -> rustix::io::Result<()> {
    unmount(dir, UnmountFlags::FORCE)
}

/// Unmounts. Tries again while the mount is busy: another test may be starting a program, which has the open files of
/// this process until it calls exec.
fn unmount(dir: &Path, flags: UnmountFlags) -> rustix::io::Result<()> {
    for _ in 0..200 {
        match rustix::mount::unmount(dir, flags) {
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(5)),
            done => return done,
        }
    }
    rustix::mount::unmount(dir, flags)
}

fn signal(name: &str, server: u32) {
    run("kill", [name, &server.to_string()]).unwrap();
}

/// Whether all threads of a process are stopped by a signal (state T).
fn is_stopped(process: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let state = |stat: String| stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
    threads.map(|thread| fs::read_to_string(thread.path().join("stat")).unwrap()).all(|stat| state(stat) == Some('T'))
}

/// As for Linux, whose tools take the device of a mounted filesystem.
#[test]
fn commands_take_the_device_of_a_mounted_filesystem() {
    if !ready() {
        return;
    }
    for options in ["noatime", FUSEBLK] {
        let bed = Bed::new();
        bed.mount(options);
        let device = bed.device.path();
        let outputs = [
            ubtrfs(["filesystem", "label", device, "of the mount"]),
            ubtrfs(["filesystem", "label", device]),
            ubtrfs(["filesystem", "show", device]),
            ubtrfs(["inspect-internal", "dump-super", device]),
            ubtrfs(["inspect-internal", "dump-tree", "-t", "chunk", device]),
            ubtrfs(["check", "--force", device]),
        ];
        let without = ubtrfs(["check", device]);
        bed.umount();
        let [_, label, show, dump_super, _, check] = outputs.map(|output| {
            assert!(output.status.success(), "{options}: {output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        });
        assert_eq!(label, "of the mount\n", "{options}");
        assert!(show.contains(device) && show.contains("of the mount"), "{options}: {show}");
        assert!(dump_super.contains("of the mount"), "{options}: {dump_super}");
        assert!(check.contains(": clean"), "{options}: {check}");
        assert!(
            !without.status.success() && String::from_utf8_lossy(&without.stderr).contains("--force"),
            "{without:?}"
        );
        // Without a path, filesystems on block devices are shown, too. Other tests stop servers, of which it warns.
        let shown = |args: &[&str]| {
            let output = ubtrfs(args);
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let all = shown(&["filesystem", "show"]);
        assert!(all.contains(&format!("path {device}\n")), "{options}: {all}");
        assert!(!shown(&["filesystem", "show", "-m"]).contains(device), "{options}");
    }
}

#[test]
fn sync_and_umount_of_a_block_device_wait_for_the_commit() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    bed.mount(FUSEBLK);
    assert_eq!(bed.kind().as_deref(), Some("fuseblk.ubtrfs"));
    assert!(bed.claim().is_err(), "the kernel holds the device for the mount");

    fs::write(bed.join("synced"), b"by syncfs").unwrap();
    rustix::fs::syncfs(fs::File::open(bed.dir.path()).unwrap()).unwrap();
    assert_eq!(bed.on_disk("synced").as_deref(), Some(&b"by syncfs"[..]));

    fs::write(bed.join("synced"), b"by sync").unwrap();
    rustix::fs::sync();
    assert_eq!(bed.on_disk("synced").as_deref(), Some(&b"by sync"[..]));

    fs::write(bed.join("last"), vec![b'x'; 5_000_000]).unwrap();
    // Plain umount(2), without the program.
    unmount(bed.dir.path(), UnmountFlags::NOFOLLOW).unwrap();
    assert_eq!(bed.on_disk("last").unwrap().len(), 5_000_000);

    // The server may not have ended yet; a new mount waits for its end.
    bed.mount("ro");
    assert_eq!(bed.kind().as_deref(), Some("fuse.ubtrfs"), "several read-only mounts may share a device");
    assert_eq!(fs::read(bed.join("synced")).unwrap(), b"by sync");
    bed.umount();
}

#[test]
fn a_block_device_is_mounted_again_after_every_end() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    bed.mount(FUSEBLK);
    fs::write(bed.join("file"), b"1").unwrap();
    bed.umount();
    let device = fs::File::open(bed.device.path()).unwrap();
    rustix::fs::flock(&device, FlockOperation::NonBlockingLockExclusive)
        .expect("`umount` returns with the device free");
    drop(device);
    assert_eq!((bed.kind(), bed.on_disk("file").as_deref()), (None, Some(&b"1"[..])));

    bed.mount(FUSEBLK);
    fs::write(bed.join("file"), b"2").unwrap();
    refused(&ubtrfs(["ls", &format!("{}:/", bed.device.path())]), &["ubtrfs umount"]);
    rustix::fs::sync();
    signal("-KILL", server_of(bed.dir.path()));
    rustix::mount::unmount(bed.dir.path(), UnmountFlags::DETACH).unwrap();
    bed.mount(FUSEBLK);
    assert_eq!(fs::read(bed.join("file")).unwrap(), b"2", "it was synced before the server was killed");

    fs::write(bed.join("file"), b"3").unwrap();
    // After SIGTERM, the server unmounts the filesystem by itself.
    signal("-TERM", server_of(bed.dir.path()));
    wait_until("the server unmounts and ends", || bed.kind().is_none() && bed.is_unlocked());
    bed.mount("noio_uring");
    assert_eq!(fs::read(bed.join("file")).unwrap(), b"3");
    ok(ubtrfs(bed.arguments("remount,ro")));
    assert!(fs::write(bed.join("file"), b"4").is_err());
    unmount(bed.dir.path(), UnmountFlags::NOFOLLOW).unwrap();
    assert_eq!(bed.on_disk("file").as_deref(), Some(&b"3"[..]));
}

/// Writes files that the server accepts but does not commit yet.
fn write_uncommitted(bed: &Bed) {
    for nr in 0..300 {
        fs::write(bed.join(&format!("n{nr}")), vec![b'x'; 5000]).unwrap();
    }
    fs::write(bed.join("last"), vec![b'x'; 5_000_000]).unwrap();
}

/// Makes files, reads and syncs in a directory until the directory is gone.
const WORK: &str = r"
import os, sys
try:
    while True:
        fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        os.write(fd, bytes(5000))
        for _ in range(200): os.statvfs(sys.argv[2])
        os.fsync(fd)
        os.close(fd)
except FileNotFoundError:
    pass
";

#[test]
fn a_confined_server_under_load_ends_after_sigterm() {
    if !ready() || !capability::program("python3") {
        return;
    }
    for round in 0..3 {
        let bed = Bed::new();
        let mut server = bed.serve("commit=300,fuseblk,noio_uring", "--sandbox");
        let busy = bed.join("busy");
        fs::create_dir(&busy).unwrap();
        let work = |nr: u32| {
            let mut command = Command::new("python3");
            command.args(["-c", WORK]).arg(busy.join(nr.to_string())).arg(&busy).stderr(Stdio::null());
            command.spawn().unwrap()
        };
        let clients: Vec<Child> = (0..6).map(work).collect();
        std::thread::sleep(Duration::from_millis(400 + 150 * round));
        signal("-TERM", server.id());
        let mut tries = 0;
        while server.try_wait().unwrap().is_none() {
            tries += 1;
            if tries > 1000 {
                let _ = server.kill();
                panic!("round {round}: the server still runs 20 s after SIGTERM");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = server.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for mut client in clients {
            client.wait().unwrap();
        }
        btrfs_check(bed.image.path()).unwrap();
    }
}

#[test]
fn a_server_commits_after_umount_by_force() {
    if !ready() {
        return;
    }
    for (options, flag) in [(FUSEBLK, "--no-sandbox"), ("commit=300,fuseblk,noio_uring", "--sandbox")] {
        let bed = Bed::new();
        let server = bed.serve(options, flag);
        assert_eq!(bed.kind().as_deref(), Some("fuseblk.ubtrfs"), "{flag}");
        write_uncommitted(&bed);
        force(bed.dir.path()).unwrap();
        let output = server.wait_with_output().unwrap();
        assert!(output.status.success(), "{flag}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(bed.on_disk("last").map(|content| content.len()), Some(5_000_000), "{flag}");
        bed.wait_until_free();
    }
}

#[test]
fn a_server_writes_nothing_to_a_device_that_linux_mounted_after_umount_by_force() {
    if !ready() {
        return;
    }
    for (options, flag) in [("commit=300,fuseblk,discard", "--no-sandbox"), (FUSEBLK, "--sandbox")] {
        let bed = Bed::new();
        let server = bed.serve(options, flag);
        fs::write(bed.join("kept"), b"committed").unwrap();
        for nr in 0..300 {
            fs::write(bed.join(&format!("n{nr}")), vec![b'a'; 5000]).unwrap();
        }
        ok(ubtrfs(["sync".as_ref(), bed.dir.path().as_os_str()]));
        write_uncommitted(&bed);
        signal("-STOP", server.id());
        wait_until("the server stops", || is_stopped(server.id()));
        force(bed.dir.path()).unwrap();
        bed.wait_until_free();
        let theirs = TempDir::with_prefix("ubtrfs-block-kernel-").unwrap();
        let point = theirs.path().to_str().unwrap();
        run("mount", ["-t", "btrfs", bed.device.path(), point]).unwrap();
        fs::write(theirs.path().join("by-linux"), vec![b'k'; 3_000_000]).unwrap();
        signal("-CONT", server.id());
        let output = server.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{flag}: {told}");
        for word in [bed.device.path(), "nothing more is written", "all changes after the commit of generation"] {
            assert!(told.contains(word), "{flag}: '{word}' is missing: {told}");
        }
        // Drop Linux's cache, so that Linux reads the device.
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        assert_eq!(fs::read(theirs.path().join("n299")).unwrap(), vec![b'a'; 5000], "{flag}");
        run("btrfs", ["filesystem", "sync", point]).unwrap();
        let scrubbed = run("btrfs", ["scrub", "start", "-B", point]).unwrap();
        assert!(scrubbed.contains("no errors found"), "{flag}: {scrubbed}");
        run("umount", [point]).unwrap();
        assert_eq!(bed.on_disk("kept").as_deref(), Some(&b"committed"[..]), "{flag}");
        assert_eq!(bed.on_disk("by-linux").map(|content| content.len()), Some(3_000_000), "{flag}");
    }
}

/// After the mount's FUSE connection was aborted, the mount still exists and still holds the exclusive claim on the
/// device.
#[test]
fn a_server_commits_after_an_abort_that_leaves_the_mount() {
    if !ready() {
        return;
    }
    let control = TempDir::with_prefix("ubtrfs-block-fusectl-").unwrap();
    let point = control.path().to_str().unwrap();
    run("mount", ["-t", "fusectl", "none", point]).unwrap();
    for flag in ["--no-sandbox", "--sandbox"] {
        let bed = Bed::new();
        let server = bed.serve(FUSEBLK, flag);
        write_uncommitted(&bed);
        let busy = fs::File::open(bed.join("n1")).unwrap();
        let connection = fs::metadata(bed.dir.path()).unwrap().dev();
        // fusectl has a directory for each connection. The directory's name is the mount's device number in the
        // kernel's internal encoding.
        let number = u64::from(rustix::fs::major(connection)) << 20 | u64::from(rustix::fs::minor(connection));
        fs::write(control.path().join(number.to_string()).join("abort"), "1").unwrap();
        let output = server.wait_with_output().unwrap();
        assert_eq!(bed.on_disk("last").map(|content| content.len()), Some(5_000_000), "{flag}: {output:?}");
        drop(busy);
        if bed.kind().is_some() {
            unmount(bed.dir.path(), UnmountFlags::NOFOLLOW).unwrap();
        }
        bed.wait_until_free();
    }
    run("umount", [point]).unwrap();
}

#[test]
fn a_mount_without_the_type_fuseblk_says_why() {
    if !ready() {
        return;
    }
    let bed = Bed::new();
    let told = |options: &str| {
        let output = ubtrfs(bed.arguments(options));
        assert!(output.status.success(), "{options}: {output:?}");
        assert_eq!(bed.kind().as_deref(), Some("fuse.ubtrfs"), "{options}");
        bed.umount();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (options, reason) in [
        ("fuseblk,ro", "the mount is read-only"),
        ("fuseblk,fsname=other", "fsname= names another path"),
        ("fuseblk,ro,fsname=other", "the mount is read-only"),
    ] {
        let told = told(options);
        assert!(told.contains("the option fuseblk has no effect") && told.contains(reason), "{options}: {told}");
    }
    assert_eq!(told("fsname=other"), "");
}

/// A program may lock a device for the commands that it runs on it, as flock(1) does here.
#[test]
fn a_lock_of_the_calling_program_is_no_use_of_the_device() {
    if !ready() || !capability::program("flock") {
        return;
    }
    let bed = Bed::new();
    let device = bed.device.path();
    let locked = |kind: &str, args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_ubtrfs");
        Command::new("flock").args([kind, device, program]).args(args).env("LC_ALL", "C").output().unwrap()
    };
    for kind in ["-x", "-s"] {
        bed.wait_until_free();
        ok(locked(kind, &["mkfs", "-q", "-f", "-L", "one", device]));
        ok(locked(kind, &["check", device]));
        ok(locked(kind, &["filesystem", "label", device, "two"]));
        ok(locked(kind, &["mount", device, bed.dir.path().to_str().unwrap()]));
        // Device managers lock what they look at.
        run("flock", ["-n", "-s", device, "true"]).unwrap();
        assert!(run("flock", ["-n", "-x", device, "true"]).is_err());
        // The lock does not let others in.
        for args in [&["check", device][..], &["mkfs", "-q", "-f", device]] {
            let output = locked("-s", args);
            assert_ne!(output.status.code(), Some(0), "{args:?}: {output:?}");
        }
        fs::write(bed.join("file"), kind).unwrap();
        bed.umount();
        assert_eq!(bed.on_disk("file").unwrap(), kind.as_bytes());
    }
    // A lock of another program is a use.
    let mut other = Command::new("flock").args(["-x", device, "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    wait_until("the device is locked", || run("flock", ["-n", "-s", device, "true"]).is_err());
    refused(&ubtrfs(["mkfs", "-q", "-f", device]), &["in use"]);
    drop(other.stdin.take());
    other.wait().unwrap();
}
