//! Images on web servers.
//!
//! Method: a small web server in this process serves image files by ranges, counts the bytes that it sends, and breaks
//! rules when it is told to. The program uses the image by its URL; afterwards the image file must be as before.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

use crate::common::{command, ok, refused, text, ubtrfs};
use crate::nbd::make_certificates;

/// How a server treats requests.
#[derive(Default)]
struct Manners {
    /// Bytes of content that were sent.
    nr_sent: AtomicU64,
    nr_requests: AtomicU64,
    /// The version of the content, which the tag names.
    version: AtomicU64,
    /// Sends the whole content for any range.
    ignores_ranges: AtomicBool,
    /// Sends the content of any version, whatever version is asked for.
    ignores_conditions: AtomicBool,
    /// Every third request fails: in turn with a status, with a connection that is closed amid the content.
    is_flaky: AtomicBool,
    /// Never answers a request for content.
    is_silent: AtomicBool,
    /// Closes all connections at once.
    is_away: AtomicBool,
}

struct WebServer {
    dir: TempDir,
    port: u16,
    manners: Arc<Manners>,
}

impl WebServer {
    fn start() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-web-").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, manners) = (listener.local_addr().unwrap().port(), Arc::<Manners>::default());
        let (root, served) = (dir.path().to_owned(), Arc::clone(&manners));
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (root, manners) = (root.clone(), Arc::clone(&served));
                std::thread::spawn(move || serve(&socket, &root, &manners));
            }
        });
        Self { dir, port, manners }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.port)
    }

    /// Makes an image with a large file and a directory of small ones.
    fn image(&self, name: &str, size: &str) -> PathBuf {
        let (image, tree) = (self.path(name), self.path("tree"));
        if !tree.exists() {
            fs::create_dir_all(tree.join("etc")).unwrap();
            for number in 0..500 {
                fs::write(tree.join(format!("etc/{number}")), format!("file {number}\n").repeat(200)).unwrap();
            }
            fs::write(tree.join("large"), large()).unwrap();
        }
        ok(ubtrfs(["mkfs", "-q", "-b", size, "-r", &text(&tree), &text(&image)]));
        image
    }
}

fn large() -> Vec<u8> {
    (0..12u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// Answers the requests of a connection.
fn serve(mut socket: &TcpStream, root: &Path, manners: &Manners) -> Option<()> {
    let mut input = BufReader::new(socket);
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if input.read_line(&mut line).ok()? == 0 || manners.is_away.load(Ordering::Relaxed) {
                return None;
            }
            if line.trim().is_empty() {
                break;
            }
            lines.push(line.trim().to_owned());
        }
        let mut words = lines.first()?.split(' ');
        let (method, path) = (words.next()?, words.next()?);
        let header = |name: &str| {
            let found =
                lines.iter().find_map(|line| line.split_once(": ").filter(|(key, _)| key.eq_ignore_ascii_case(name)));
            found.map(|(_, value)| value.to_owned())
        };
        while method == "GET" && manners.is_silent.load(Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let number = manners.nr_requests.fetch_add(1, Ordering::Relaxed);
        let is_failing = manners.is_flaky.load(Ordering::Relaxed) && number % 3 == 2;
        let tag = format!("\"v{}\"", manners.version.load(Ordering::Relaxed));
        let file = File::open(root.join(path.trim_start_matches('/'))).ok();
        let len = file.as_ref().map_or(0, |file| file.metadata().unwrap().len());
        let range = header("range").and_then(|range| {
            let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((start.parse::<u64>().ok()?, end.parse::<u64>().ok()?.min(len.saturating_sub(1))))
        });
        let range = range.filter(|_| !manners.ignores_ranges.load(Ordering::Relaxed));
        let checks = !manners.ignores_conditions.load(Ordering::Relaxed);
        let (status, start, end) = match (&file, range) {
            (None, _) => ("404 Not Found", 0, 0),
            _ if is_failing && number.is_multiple_of(2) => ("503 Service Unavailable", 0, 0),
            _ if checks && header("if-match").is_some_and(|wanted| wanted != tag) => ("412 Precondition Failed", 0, 0),
            (Some(_), Some((start, end))) => ("206 Partial Content", start, end + 1),
            (Some(_), None) => ("200 OK", 0, len),
        };
        let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: {tag}\r\n", end - start);
        head += "Last-Modified: Mon, 30 Nov 2026 10:00:00 GMT\r\nAccept-Ranges: bytes\r\n";
        if status.starts_with("206") {
            head += &format!("Content-Range: bytes {start}-{}/{len}\r\n", end - 1);
        }
        socket.write_all((head + "\r\n").as_bytes()).ok()?;
        if method == "GET" && end > start {
            let mut content = vec![0; (end - start) as usize];
            file?.read_exact_at(&mut content, start).ok()?;
            if is_failing {
                let _ = socket.write_all(&content[..content.len() / 2]);
                return None;
            }
            socket.write_all(&content).ok()?;
            manners.nr_sent.fetch_add(end - start, Ordering::Relaxed);
        }
    }
}

#[test]
fn commands_read_an_image_on_a_web_server() {
    let server = WebServer::start();
    let image = server.image("disk.img", "400M");
    let before = fs::read(&image).unwrap();
    let url = server.url("disk.img");
    assert_eq!(ok(ubtrfs(["ls", &url])), "etc\nlarge\n");
    assert_eq!(ok(ubtrfs(["cat", &format!("{url}:/etc/7")])), "file 7\n".repeat(200));
    let copy = server.path("copy");
    ok(ubtrfs(["cp", &format!("{url}:/large"), &text(&copy)]));
    assert!(fs::read(&copy).unwrap() == large());
    assert!(ok(ubtrfs(["check", "--check-data-csum", &url])).contains("clean"));
    assert!(ok(ubtrfs(["inspect", "dump-super", &url])).contains("_BHRfS_M"));
    for args in [&["mkdir", &format!("{url}:/new")][..], &["mkfs", "-f", &url], &["tune", "-S1", &url]] {
        refused(&ubtrfs(args), &["is an object, which can only be read; copy it"]);
    }
    // Half of the requests fail in one of two ways, and are repeated.
    server.manners.is_flaky.store(true, Ordering::Relaxed);
    fs::remove_file(&copy).unwrap();
    ok(ubtrfs(["cp", &format!("{url}:/large"), &text(&copy)]));
    assert!(fs::read(&copy).unwrap() == large());
    assert!(fs::read(&image).unwrap() == before);
}

#[test]
fn the_process_that_reads_an_object_ends_although_the_server_is_silent() {
    let server = WebServer::start();
    server.image("disk.img", "400M");
    server.manners.is_silent.store(true, Ordering::Relaxed);
    let url = server.url("disk.img");
    let readers = || {
        let mut found = 0;
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            found += usize::from(words.any(|word| word == b"serve-object") && words.any(|word| word == url.as_bytes()));
        }
        found
    };
    let until = |is_done: &dyn Fn() -> bool| {
        let begun = std::time::Instant::now();
        while !is_done() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{} processes", readers());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    let mut client = command(["ls", &url]);
    let mut client = client.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until(&|| readers() > 0);
    // It is amid the read of a superblock.
    std::thread::sleep(std::time::Duration::from_millis(300));
    client.kill().unwrap();
    client.wait().unwrap();
    until(&|| readers() == 0);
    server.manners.is_silent.store(false, Ordering::Relaxed);
}

/// A proxy that speaks TLS with clients, and the server's language without it. Its arguments are a certificate, its key and
/// the server's port.
const TLS_PROXY: &str = r"
import socket, ssl, sys, threading
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)

def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def serve(client):
    try:
        client = context.wrap_socket(client, server_side=True)
    except OSError:
        return
    server = socket.create_connection(('127.0.0.1', int(sys.argv[3])))
    threading.Thread(target=pump, args=(client, server), daemon=True).start()
    pump(server, client)

while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
";

/// A running [`TLS_PROXY`], which is killed when this is dropped.
struct TlsProxy(Child);

impl Drop for TlsProxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn certificates_of_web_servers_are_verified() {
    if !capability::program("python3") {
        return;
    }
    let server = WebServer::start();
    server.image("disk.img", "400M");
    make_certificates(server.dir.path());
    let [authority, certificate, key] =
        ["ca-cert.pem", "server-cert.pem", "server-key.pem"].map(|name| text(&server.path(name)));
    let words = ["-c", TLS_PROXY, &certificate, &key, &server.port.to_string()];
    let mut child = Command::new("python3").args(words).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut port = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let _proxy = TlsProxy(child);
    let url = format!("https://localhost:{}/disk.img", port.trim());
    let listed = |url: &str, trusted: Option<&str>| {
        let mut command = command(["ls", url]);
        command.env_remove("SSL_CERT_DIR");
        match trusted {
            Some(file) => command.env("SSL_CERT_FILE", file),
            None => command.env_remove("SSL_CERT_FILE"),
        };
        command.output().unwrap()
    };
    assert_eq!(ok(listed(&url, Some(&authority))), "etc\nlarge\n");
    refused(&listed(&url, None), &["certificate"]);
    let by_address = url.replace("localhost", "127.0.0.1");
    refused(&listed(&by_address, Some(&authority)), &["certificate"]);
}

#[test]
fn objects_that_cannot_be_opened_are_one_line_each() {
    let server = WebServer::start();
    server.image("disk.img", "400M");
    fs::write(server.path("text"), "no image").unwrap();
    refused(&ubtrfs(["ls", &server.url("absent.img")]), &["absent.img", "does not exist"]);
    refused(&ubtrfs(["ls", &server.url("text")]), &["text"]);
    refused(&ubtrfs(["ls", "http://127.0.0.1:1/x"]), &["http://127.0.0.1:1/x"]);
    refused(&ubtrfs(["ls", "http://user:hunter22@host/x"]), &["put credentials into the environment"]);
    refused(&ubtrfs(["ls", "https://host/x?token=hunter22"]), &["put credentials into the environment"]);
    refused(&ubtrfs(["ls", "https://host"]), &["names no object"]);
    let writable = ["mount", "-o", "rw", &server.url("disk.img"), &text(server.dir.path())];
    refused(&ubtrfs(writable), &["can only be read; leave out rw"]);
    server.manners.ignores_ranges.store(true, Ordering::Relaxed);
    refused(&ubtrfs(["ls", &server.url("disk.img")]), &["disk.img", "ranges"]);
}

/// Unmounts when it is dropped.
struct Unmounted<'d>(&'d Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0).stderr(std::process::Stdio::null()).status();
    }
}

#[test]
fn a_mount_of_a_large_image_reads_a_few_mib() {
    if !capability::fuse() || !capability::root() {
        return;
    }
    let server = WebServer::start();
    server.image("disk.img", "10G");
    let (url, dir) = (server.url("disk.img"), server.path("mnt"));
    fs::create_dir(&dir).unwrap();
    let _unmounted = Unmounted(&dir);
    // A confined server makes no connections.
    for sandbox in ["--no-sandbox", "--sandbox"] {
        let before = server.manners.nr_sent.load(Ordering::Relaxed);
        ok(ubtrfs(["mount", sandbox, &url, &text(&dir)]));
        assert_eq!(fs::read_dir(dir.join("etc")).unwrap().count(), 500);
        assert_eq!(fs::read_to_string(dir.join("etc/499")).unwrap(), "file 499\n".repeat(200));
        let nr_sent = server.manners.nr_sent.load(Ordering::Relaxed) - before;
        assert!(nr_sent < 8 << 20, "{nr_sent} bytes");
        assert!(fs::read(dir.join("large")).unwrap() == large());
        assert!(fs::write(dir.join("new"), "").is_err());
        ok(ubtrfs(["umount", &text(&dir)]));
    }
    // After a change of the object, reads fail, because nothing fits together any more.
    ok(ubtrfs(["mount", &url, &text(&dir)]));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
    server.manners.version.fetch_add(1, Ordering::Relaxed);
    for ignores_conditions in [true, false] {
        server.manners.ignores_conditions.store(ignores_conditions, Ordering::Relaxed);
        assert!(fs::read(dir.join("large")).is_err());
    }
    server.manners.version.fetch_sub(1, Ordering::Relaxed);
    // So they do while the server is away, and no longer.
    server.manners.is_away.store(true, Ordering::Relaxed);
    assert!(fs::read(dir.join("etc/250")).is_err() || fs::read(dir.join("large")).is_err());
    server.manners.is_away.store(false, Ordering::Relaxed);
    assert!(fs::read(dir.join("large")).unwrap() == large());
    ok(ubtrfs(["umount", &text(&dir)]));
}
