//! Tests of ioctls that take long and whose process gets a signal, or whose mount ends.
//!
//! Method: this process serves a mount of a device in memory, whose large reads and writes can be made slow. Programs
//! in other processes make ioctls and get signals.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::transport::Transport;
use ubtrfs_fuse::{MountConfig, MountError, Session};
use ubtrfs_testkit::{capability, run};

#[derive(Debug)]
struct SlowDevice {
    below: MemoryDevice,
    is_slow: AtomicBool,
    /// Bytes of data written while the device was slow.
    nr_slow_bytes: AtomicU64,
}

impl SlowDevice {
    /// Delays requests that transport data, but not the blocks of trees, so that a commit stays fast.
    fn delay(&self, len: usize) {
        if len >= 64 << 10 && self.is_slow.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(50 * len.div_ceil(1 << 20) as u64));
        }
    }
}

impl Device for SlowDevice {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.delay(buf.len());
        self.below.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> std::io::Result<()> {
        if buf.len() >= 64 << 10 && self.is_slow.load(Ordering::Relaxed) {
            self.nr_slow_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
        }
        self.delay(buf.len());
        self.below.write_at(offset, buf)
    }

    fn flush(&self) -> std::io::Result<()> {
        self.below.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> std::io::Result<()> {
        self.below.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        "a slow device".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

struct Mount {
    device: Arc<SlowDevice>,
    fs: Arc<Fs>,
    dir: TempDir,
    server: JoinHandle<Result<(), MountError>>,
}

impl Mount {
    /// Mounts a filesystem with 200 MiB of data, and makes its device slow.
    fn new(transport: Transport) -> Self {
        let device = Arc::new(SlowDevice {
            below: MemoryDevice::new(1 << 30),
            is_slow: AtomicBool::new(false),
            nr_slow_bytes: AtomicU64::new(0),
        });
        ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs =
            Fs::open(vec![device.clone()], MountOptions { track_lookups: true, ..MountOptions::default() }).unwrap();
        let dir = TempDir::with_prefix("ubtrfs-interrupts-").unwrap();
        let session =
            Session::mount(fs.clone(), dir.path(), &MountConfig { transport, ..MountConfig::default() }).unwrap();
        let mount = Self { device, fs, dir, server: std::thread::spawn(move || session.run()) };
        // Write the file in pieces from its end to its start, so that it consists of many extents.
        let fill = "
import os
fd = os.open('file', os.O_CREAT | os.O_RDWR)
for at in range(200 * 8, 0, -1):
    os.pwrite(fd, bytes([at % 251 + 1]) * (128 << 10), (at - 1) * (128 << 10))
    if at % 4 == 0: os.fdatasync(fd)
os.fsync(fd)
";
        assert!(mount.python(fill, "").wait().unwrap().success());
        mount.device.is_slow.store(true, Ordering::Relaxed);
        mount
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn python(&self, program: &str, argument: &str) -> Child {
        let mut command = Command::new("env");
        command.args(["--default-signal=HUP,INT,QUIT,TERM", "python3", "-c", program, argument]);
        command.current_dir(self.path()).stdout(Stdio::piped()).spawn().unwrap()
    }

    fn wait_for_balance(&self) {
        let start = Instant::now();
        while !self.fs.balance_status().is_some_and(|status| status.is_running) {
            assert!(start.elapsed() < Duration::from_secs(30), "no balance starts");
            sleep(Duration::from_millis(5));
        }
    }

    /// Fails if, since the last call, at least as much data was written as the filesystem has (200 MiB).
    #[track_caller]
    fn assert_unfinished(&self) {
        let bytes = self.device.nr_slow_bytes.swap(0, Ordering::Relaxed);
        assert!(bytes < 200 << 20, "{bytes} bytes were moved, so the balance was not cancelled");
    }

    fn end(self) {
        let Self { device, fs, dir, server } = self;
        device.is_slow.store(false, Ordering::Relaxed);
        drop(fs);
        ubtrfs_fuse::unmount(dir.path(), false).unwrap();
        server.join().unwrap().unwrap();
    }
}

fn can_run() -> bool {
    capability::fuse() && capability::program("python3")
}

/// Sends a signal, and returns the signal that ended the process.
fn killed(mut child: Child, signal: Signal) -> Option<i32> {
    let start = Instant::now();
    kill_process(Pid::from_child(&child), signal).unwrap();
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(20), "{signal:?} does not end the process");
        sleep(Duration::from_millis(5));
    }
    child.wait().unwrap().signal()
}

/// Prints the result of an ioctl, during which a handled SIGALRM arrives.
const CALL: &str = r"
import errno, fcntl, os, signal, struct, sys
signal.signal(signal.SIGALRM, lambda *_: None)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.setitimer(signal.ITIMER_REAL, 0.3)
number, path, argument = {
    'balance': (0xc4009420, '.', struct.pack('<Q', 1).ljust(1024, b'\0')),
    'defragment': (0x40309410, 'file', struct.pack('<QQQII16x', 0, 2**64 - 1, 2, 32 << 20, 0)),
}[sys.argv[1]]
fd = os.open(path, os.O_RDWR if path == 'file' else os.O_RDONLY)
try:
    fcntl.ioctl(fd, number, bytearray(argument))
    print('done')
except OSError as error:
    print(errno.errorcode[error.errno])
";

#[test]
fn a_signal_that_kills_the_process_cancels_a_balance() {
    if !can_run() {
        return;
    }
    for transport in [Transport::Auto, Transport::DevFuse] {
        let mount = Mount::new(transport);
        for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL] {
            let balance = mount.python(CALL, "balance");
            mount.wait_for_balance();
            assert_eq!(killed(balance, signal), Some(signal.as_raw()), "{transport:?}");
            assert_eq!(mount.fs.balance_status(), None, "as on Linux, it is cancelled, not paused");
            mount.assert_unfinished();
        }
        mount.end();
    }
}

#[test]
fn a_handled_signal_does_not_end_a_balance_and_a_later_kill_does() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(Transport::Auto);
    let balance = mount.python(CALL, "balance");
    mount.wait_for_balance();
    sleep(Duration::from_secs(1));
    mount.wait_for_balance();
    // The kernel sends only one INTERRUPT for a request, and has already sent it for SIGALRM. While SIGALRM is pending,
    // only SIGKILL kills at once, as on Linux.
    assert_eq!(killed(balance, Signal::KILL), Some(Signal::KILL.as_raw()));
    assert_eq!(mount.fs.balance_status(), None);
    mount.assert_unfinished();
    mount.end();
}

#[test]
fn a_handled_signal_ends_a_defragmentation() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(Transport::Auto);
    let defragment = mount.python(CALL, "defragment").wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&defragment.stdout), "EAGAIN\n", "as on Linux");
    mount.end();
}

#[test]
fn the_end_of_the_mount_does_not_wait_for_an_ioctl() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(Transport::Auto);
    let balance = mount.python(CALL, "balance");
    mount.wait_for_balance();
    assert!(ubtrfs_fuse::unmount(mount.path(), false).is_err(), "the mount is in use");
    let start = Instant::now();
    run("umount", ["-f".as_ref(), "-l".as_ref(), mount.path().as_os_str()]).unwrap();
    let Mount { fs, server, .. } = mount;
    drop(fs);
    server.join().unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let output = balance.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("ECONNABORTED"), "{output:?}");
}
