//! Tests of a server whose engine panics: programs get errors, unmounting works, and the disk keeps the last commit.
//!
//! Method: the test runs itself again as a server over a device that only tests have. Once armed through standard
//! input, the device panics in every request of one kind. System calls and `umount` then meet the broken server, and
//! each must return. After the unmount, the server must end within a time limit.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_control::Channel;
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_fuse::{MountConfig, Session};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FsTarget, Image, Medium, MediumDevice, NodeKind, Rng, Target, btrfs_check, capability};

const SERVER: &str = "UBTRFS_PANICKING_SERVER";
const LIMIT: Duration = Duration::from_secs(120);

/// A device that, once armed, panics in all requests of one kind.
#[derive(Debug)]
struct PanickingDevice {
    inner: FileDevice,
    kind: String,
    armed: Arc<AtomicBool>,
}

impl PanickingDevice {
    fn meet(&self, request: &str) {
        assert!(self.kind != request || !self.armed.load(Ordering::SeqCst), "planned panic in a {request}");
    }
}

impl Device for PanickingDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.meet("read");
        self.inner.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.meet("write");
        self.inner.write_at(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.meet("flush");
        self.inner.flush()
    }
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.discard(offset, len_bytes)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }
}

/// Not a test: runs the server if the environment variable [`SERVER`] is set.
#[test]
fn server() {
    let Some(arguments) = std::env::var_os(SERVER) else { return };
    let arguments = arguments.into_string().unwrap();
    let [kind, image, dir] = arguments.split(':').collect::<Vec<_>>().try_into().unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let inner = FileDevice::open(Path::new(image), Access::ReadWrite).unwrap();
    let device = PanickingDevice { inner, kind: kind.to_owned(), armed: Arc::clone(&armed) };
    let options = MountOptions { track_lookups: true, ..MountOptions::parse("commit=300").unwrap() };
    let fs = Fs::open(vec![Arc::new(device)], options).unwrap();
    let session = Session::mount(fs, Path::new(dir), &MountConfig::default()).unwrap();
    std::thread::spawn(move || {
        let mut line = String::new();
        while io::stdin().read_line(&mut line).is_ok_and(|len| len > 0) {
            armed.store(true, Ordering::SeqCst);
            println!("\narmed");
        }
    });
    println!("\nmounted");
    // The program `ubtrfs mount` handles the end of its session in the same way.
    if let Err(error) = session.run() {
        eprintln!("ubtrfs: {error}");
        std::process::exit(1);
    }
    std::process::exit(0);
}

/// A running server.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
    dir: TempDir,
}

impl Running {
    fn start(kind: &str, image: &Path) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-panicking-").unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "panicking_server::server", "--nocapture", "--test-threads=1"])
            .env(SERVER, format!("{kind}:{}:{}", image.display(), dir.path().display()))
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut running = Self { child, out, dir };
        running.wait_for("mounted");
        running
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "the server ended before it said {word}");
        }
    }

    fn arm(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.wait_for("armed");
    }

    /// Waits until the server ends. Returns the server's exit status and messages.
    fn end(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LIMIT, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (status, text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = ubtrfs_fuse::unmount(self.dir.path(), true);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn failed<T>(result: io::Result<T>) -> bool {
    const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
    const EROFS: i32 = rustix::io::Errno::ROFS.raw_os_error();
    match result {
        Ok(_) => false,
        Err(error) => {
            assert!(matches!(error.raw_os_error(), Some(EIO | EROFS)), "{error}");
            true
        }
    }
}

fn panic_in(kind: &str) {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::empty(0).unwrap();
    let mut rng = Rng::new(1);
    let (kept, cold) = (rng.bytes(300_000), rng.bytes(3_000_000));
    prepare(image.path(), &kept, &cold);
    let mut server = Running::start(kind, image.path());
    let dir = server.dir.path().to_owned();
    let at = |name: &str| dir.join(name);
    assert_eq!(fs::read(at("kept")).unwrap(), kept);
    fs::write(at("synced"), &kept).unwrap();
    Channel::mount(&dir).unwrap().sync().unwrap();
    server.arm();

    // The server panics in this request, and the request's caller gets an error.
    let open = File::options().write(true).open(at("synced"));
    if kind == "read" {
        assert!(failed(fs::read(at("cold"))), "reading from a device that panics succeeds");
    } else {
        let file = File::create(at("new")).unwrap();
        file.write_all_at(&cold, 0).unwrap();
        assert!(failed(file.sync_all()), "fsync on a device that panics succeeds");
    }
    // After the panic, nothing can be changed.
    assert!(failed(File::create(at("later"))), "files are made after a panic");
    assert!(failed(fs::rename(at("kept"), at("moved"))), "files are renamed after a panic");
    assert!(failed(open.and_then(|file| file.write_all_at(b"later", 0).and_then(|()| file.sync_all()))));
    assert!(Channel::mount(&dir).unwrap().sync().is_err(), "sync succeeds after a panic");
    // Cached data may still be read, and must be right.
    if let Ok(read) = fs::read(at("kept")) {
        assert_eq!(read, kept);
    }
    let said = ubtrfs_fuse::unmount(&dir, false).unwrap_err().to_string();
    assert!(said.contains("planned panic"), "umount says: {said}");
    let (status, text) = server.end();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.lines().any(|line| line.starts_with("ubtrfs: ") && line.contains("planned panic")), "{text}");

    btrfs_check(image.path()).unwrap();
    let device = Arc::new(MediumDevice::new(Medium::from_image(image.path()).unwrap()));
    let mut target = FsTarget::on_device(device, MountOptions::default()).unwrap();
    for (name, content) in [("kept", &kept), ("synced", &kept), ("cold", &cold)] {
        assert!(target.read(name.as_bytes(), 0, 4 << 20).unwrap() == *content, "{name} is not what it was");
    }
    assert!(target.lookup(b"later").is_err() && target.lookup(b"moved").is_err());
    assert!(target.lookup(b"new").is_err(), "what was never synced was committed after a panic");
    target.close().unwrap();
}

/// Writes an image with the files `kept` and `cold`.
fn prepare(image: &Path, kept: &[u8], cold: &[u8]) {
    let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
    let device = Arc::new(MediumDevice::new(base));
    let mut target = FsTarget::on_device(device.clone(), MountOptions::default()).unwrap();
    for (name, content) in [("kept", kept), ("cold", cold)] {
        target.create(name.as_bytes(), NodeKind::File, 0o644, (0, 0)).unwrap();
        target.write(name.as_bytes(), 0, content).unwrap();
    }
    target.close().unwrap();
    device.content().save(image).unwrap();
}

#[test]
fn a_panic_while_reading_ends_in_an_unmount() {
    panic_in("read");
}

#[test]
fn a_panic_while_writing_ends_in_an_unmount() {
    panic_in("write");
}

#[test]
fn a_panic_while_flushing_ends_in_an_unmount() {
    panic_in("flush");
}
