//! Filesystems on exports of NBD servers.
//!
//! Method: real servers serve image files through sockets: qemu-nbd, qemu-storage-daemon, nbdkit with filters, and
//! nbd-server. The program works on the exports; afterwards the images are checked from their files. In the rounds with
//! losses, a program writes into a mount and notes each promise (a completed fsync), while the server is killed at a random
//! moment. `UBTRFS_NBD_ROUNDS=100` makes more rounds; `UBTRFS_SEED` chooses other moments.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ubtrfs_testkit::{Rng, btrfs_check, btrfs_check_array, capability};

use crate::common::{NOBODY, command, let_users_mount, refused, text, ubtrfs};

/// A server, which is killed when this is dropped.
struct Server {
    child: Child,
}

impl Server {
    /// Starts a server and waits until it listens at a socket.
    fn start(program: &str, args: &[String], socket: &Path) -> Self {
        let _ = fs::remove_file(socket);
        let mut command = Command::new(program);
        let child =
            command.args(args).stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let server = Self { child };
        let begun = Instant::now();
        while !socket.exists() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{program} does not listen at {}", socket.display());
            sleep(Duration::from_millis(5));
        }
        server
    }

    /// Serves an image as the export `disk` for any number of clients, until it is killed.
    fn qemu_nbd(image: &Path, socket: &Path) -> Self {
        let words = ["-f", "raw", "-t", "-e", "0", "--discard=unmap", "-x", "disk", "-k"];
        let args = words.map(str::to_owned).into_iter().chain([text(socket), text(image)]).collect::<Vec<_>>();
        Self::start("qemu-nbd", &args, socket)
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A directory with images and sockets.
struct Bed {
    dir: TempDir,
}

impl Bed {
    fn new() -> Self {
        Self { dir: TempDir::with_prefix("ubtrfs-nbd-").unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a sparse file.
    fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(400 << 20).unwrap();
        path
    }

    fn url(&self, socket: &str) -> String {
        format!("nbd+unix:///disk?socket={}", text(&self.path(socket)))
    }

    fn mount_point(&self) -> PathBuf {
        let dir = self.path("mnt");
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path("mnt")).stderr(Stdio::null()).status();
    }
}

/// Returns the output of a command, which must have succeeded. It may say once that nothing protects against other clients.
#[track_caller]
fn done(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let notes: Vec<&str> = stderr.lines().collect();
    assert!(notes.len() <= 1 && notes.iter().all(|line| line.contains("note: nothing keeps clients")), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Makes an archive with a file, and returns its path.
fn archive(bed: &Bed) -> PathBuf {
    fs::create_dir_all(bed.path("tree/etc")).unwrap();
    fs::write(bed.path("tree/etc/motd"), "hello over a network\n").unwrap();
    fs::write(bed.path("tree/large"), vec![7; 5 << 20]).unwrap();
    let tar = bed.path("tree.tar");
    let made = Command::new("tar").arg("-C").arg(bed.path("tree")).arg("-cf").arg(&tar).arg(".").status();
    assert!(made.unwrap().success());
    tar
}

/// Makes a filesystem on an export, fills it, and reads it in all ways that need no mount.
fn use_export(bed: &Bed, url: &str) {
    done(&ubtrfs(["mkfs", "-q", "-f", url]));
    done(&ubtrfs(["import", &text(&archive(bed)), &format!("{url}:/")]));
    assert_eq!(done(&ubtrfs(["ls", &format!("{url}:/etc")])), "motd\n");
    assert_eq!(done(&ubtrfs(["ls", url])), "etc\nlarge\n");
    let copy = bed.path("copy");
    done(&ubtrfs(["cp", &format!("{url}:/large"), &text(&copy)]));
    assert!(fs::read(&copy).unwrap() == vec![7; 5 << 20]);
    fs::remove_file(copy).unwrap();
    assert!(done(&ubtrfs(["check", "--check-data-csum", url])).contains("clean"));
    assert!(done(&ubtrfs(["inspect", "dump-super", url])).contains("_BHRfS_M"));
}

#[test]
fn commands_take_the_url_of_an_export_for_an_image() {
    if !capability::program("qemu-nbd") {
        return;
    }
    let bed = Bed::new();
    let image = bed.image("image");
    let _server = Server::qemu_nbd(&image, &bed.path("socket"));
    let url = bed.url("socket");
    use_export(&bed, &url);
    assert!(done(&ubtrfs(["check", &text(&image)])).contains("clean"));
    done(&ubtrfs(["rm", "-r", &format!("{url}:/etc")]));
    assert_eq!(done(&ubtrfs(["ls", &text(&image)])), "large\n");
    assert_eq!(done(&ubtrfs(["filesystem", "label", &url, "far"])), "");
    assert_eq!(done(&ubtrfs(["filesystem", "label", &text(&image)])), "far\n");
    // Long work, which has a control socket for an image.
    assert!(done(&ubtrfs(["scrub", "start", "-B", &url])).contains("no errors found"));
    done(&ubtrfs(["balance", "start", "-m", &url]));
    done(&ubtrfs(["filesystem", "resize", "300M", &url]));
    done(&ubtrfs(["filesystem", "resize", "max", &url]));
    let further = bed.image("further");
    let far = "nbd://127.0.0.1:1/x";
    refused(&without_note(ubtrfs(["device", "add", far, &url])), &["cannot connect to 127.0.0.1:1"]);
    done(&ubtrfs(["device", "add", "-f", &text(&further), &url]));
    assert!(done(&ubtrfs(["check", &url, &text(&further)])).contains("clean"));
}

#[test]
fn a_command_makes_one_connection() {
    if !capability::program("qemu-nbd") {
        return;
    }
    let bed = Bed::new();
    let (image, socket, url) = (bed.image("image"), bed.path("socket"), bed.url("socket"));
    // Without -t, qemu-nbd takes one client and ends with it.
    let args = || ["-f", "raw", "-x", "disk", "-k", &text(&socket), &text(&image)].map(str::to_owned);
    let motd = text(&archive(&bed));
    let root = format!("{url}:/");
    let commands: [&[&str]; 4] = [&["mkfs", "-q", &url], &["import", &motd, &root], &["ls", &root], &["check", &url]];
    for words in commands {
        let _server = Server::start("qemu-nbd", &args(), &socket);
        done(&ubtrfs(words));
    }
    if !capability::fuse() {
        return;
    }
    let mut server = Server::start("qemu-nbd", &args(), &socket);
    let dir = bed.mount_point();
    done(&ubtrfs(["mount", &url, &text(&dir)]));
    assert_eq!(fs::read(dir.join("large")).unwrap().len(), 5 << 20);
    done(&ubtrfs(["umount", &text(&dir)]));
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn other_servers_serve_exports() {
    let bed = Bed::new();
    let (image, socket) = (text(&bed.image("image")), bed.path("socket"));
    let url = bed.url("socket");
    if capability::program("qemu-storage-daemon") {
        let args = [
            "--blockdev".to_owned(),
            format!("driver=file,node-name=f,discard=unmap,filename={image}"),
            "--nbd-server".to_owned(),
            format!("addr.type=unix,addr.path={}", text(&socket)),
            "--export".to_owned(),
            "type=nbd,id=e,node-name=f,name=disk,writable=on".to_owned(),
        ];
        let _server = Server::start("qemu-storage-daemon", &args, &socket);
        // The daemon listens before it has the export.
        sleep(Duration::from_millis(300));
        use_export(&bed, &url);
    }
    if capability::program("nbdkit") {
        let filters: [&[&str]; 5] = [
            &["file"],
            &["--filter=multi-conn", "file", "multi-conn-mode=disable"],
            &["--no-sr", "--filter=delay", "file", "rdelay=1ms", "wdelay=1ms"],
            &[
                "--filter=blocksize-policy",
                "file",
                "blocksize-minimum=4096",
                "blocksize-preferred=65536",
                "blocksize-maximum=131072",
                "blocksize-error-policy=error",
            ],
            &["--filter=cow", "file"],
        ];
        for words in filters {
            let at = words.iter().position(|word| *word == "file").unwrap() + 1;
            let mut args: Vec<String> = ["-f", "-U", &text(&socket)].map(str::to_owned).to_vec();
            args.extend(words[..at].iter().map(|word| (*word).to_owned()));
            args.push(image.clone());
            args.extend(words[at..].iter().map(|word| (*word).to_owned()));
            let _server = Server::start("nbdkit", &args, &socket);
            use_export(&bed, &url);
        }
    }
}

/// Makes the certificates of an authority, a server `localhost` and a client in a directory, with the names that qemu and
/// nbdkit know.
pub(crate) fn make_certificates(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(dir.join("ca-cert.pem"), authority.pem()).unwrap();
    for name in ["server", "client"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        fs::write(dir.join(format!("{name}-cert.pem")), certificate.pem()).unwrap();
        fs::write(dir.join(format!("{name}-key.pem")), key.serialize_pem()).unwrap();
    }
}

#[test]
fn exports_are_used_through_tls() {
    let bed = Bed::new();
    let (image, socket) = (text(&bed.image("image")), bed.path("socket"));
    let pki = bed.path("pki");
    fs::create_dir(&pki).unwrap();
    make_certificates(&pki);
    let plain = bed.url("socket");
    let url = format!("{}&tls-certificates={}", plain.replace("nbd+unix", "nbds+unix"), text(&pki));
    let check = || {
        use_export(&bed, &url);
        refused(&ubtrfs(["ls", &plain]), &["requires TLS; write nbds in place of nbd"]);
        let untrusted = plain.replace("nbd+unix", "nbds+unix");
        refused(&ubtrfs(["ls", &untrusted]), &["no TLS with", "tls-certificates=DIR"]);
    };
    if capability::program("qemu-nbd") {
        let object = format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={}", text(&pki));
        let args = [
            "-f",
            "raw",
            "-t",
            "-e",
            "8",
            "-x",
            "disk",
            "--object",
            &object,
            "--tls-creds",
            "tls",
            "-k",
            &text(&socket),
            &image,
        ]
        .map(str::to_owned);
        let _server = Server::start("qemu-nbd", &args, &socket);
        check();
        if capability::fuse() && capability::root() {
            // The session is encrypted in a process that may make no sockets and read no files.
            let dir = bed.mount_point();
            done(&ubtrfs(["mount", "--sandbox", &url, &text(&dir)]));
            fs::write(dir.join("confined"), vec![7; 8 << 20]).unwrap();
            File::open(dir.join("confined")).unwrap().sync_all().unwrap();
            done(&ubtrfs(["umount", &text(&dir)]));
            assert!(done(&ubtrfs(["ls", &url])).contains("confined"));
        }
    }
    if capability::program("nbdkit") {
        let pki = format!("--tls-certificates={}", text(&pki));
        let args = ["-f", "-U", &text(&socket), "--tls=require", &pki, "--tls-verify-peer", "file", &image];
        let _server = Server::start("nbdkit", &args.map(str::to_owned), &socket);
        check();
    }
    let _server = Server::qemu_nbd(Path::new(&image), &socket);
    refused(&ubtrfs(["ls", &url]), &["offers no TLS"]);
}

#[test]
fn errors_of_a_server_are_errors_and_change_nothing_else() {
    if !capability::program("nbdkit") {
        return;
    }
    let bed = Bed::new();
    let (image, socket, url) = (text(&bed.image("image")), bed.path("socket"), bed.url("socket"));
    let args = |words: &[&str]| {
        let all = ["-f", "-U", &text(&socket), "--filter=error", "file", &image];
        all.iter().chain(words).map(|word| (*word).to_owned()).collect::<Vec<String>>()
    };
    {
        let _server = Server::start("nbdkit", &args(&[]), &socket);
        use_export(&bed, &url);
    }
    {
        let _server = Server::start("nbdkit", &args(&["error=EIO", "error-pwrite-rate=100%"]), &socket);
        refused(&without_note(ubtrfs(["mkdir", &format!("{url}:/new")])), &["Input/output error"]);
    }
    {
        let _server = Server::start("nbdkit", &args(&["error=ENOSPC", "error-pwrite-rate=100%"]), &socket);
        refused(&without_note(ubtrfs(["mkdir", &format!("{url}:/new")])), &["No space left on device"]);
    }
    assert_eq!(done(&ubtrfs(["ls", &image])), "etc\nlarge\n");
    assert!(done(&ubtrfs(["check", &image])).contains("clean"));
}

/// Removes the note about other clients from an output.
fn without_note(output: Output) -> Output {
    let stderr = String::from_utf8(output.stderr).unwrap();
    let stderr: String = stderr.split_inclusive('\n').filter(|line| !line.contains("note: nothing keeps")).collect();
    Output { stderr: stderr.into_bytes(), ..output }
}

#[test]
fn an_export_without_flush_is_opened_read_only() {
    if !capability::program("nbd-server") {
        return;
    }
    let bed = Bed::new();
    let (image, socket) = (text(&bed.image("image")), bed.path("socket"));
    done(&ubtrfs(["mkfs", "-q", &image]));
    let config = bed.path("nbd.conf");
    let owner = if rustix::process::geteuid().is_root() { "user = root\ngroup = root\n" } else { "" };
    let export = |name: &str, flush: &str| format!("[{name}]\nexportname = {image}\n{flush}");
    let whole = [
        format!("[generic]\n{owner}unixsock = {}\n", text(&socket)),
        export("disk", "flush = false\n"),
        export("safe", "flush = true\n"),
        export("fixed", "flush = true\nreadonly = true\n"),
    ];
    fs::write(&config, whole.concat()).unwrap();
    let url = |name: &str| format!("nbd+unix:///{name}?socket={}", text(&socket));
    // With -d, the server is no daemon, and serves one client.
    let run = |words: &[&str]| {
        let _server = Server::start("nbd-server", &["-d", "-C", &text(&config)].map(str::to_owned), &socket);
        ubtrfs(words)
    };
    refused(&run(&["mkdir", &format!("{}:/new", url("disk"))]), &["cannot make writes durable", "-o ro"]);
    refused(&run(&["mkfs", "-f", &url("disk")]), &["cannot make writes durable"]);
    assert_eq!(done(&run(&["ls", &url("disk")])), "");
    assert!(done(&run(&["check", &url("disk")])).contains("clean"));
    refused(&run(&["mkdir", &format!("{}:/new", url("fixed"))]), &["serves it read-only", "-o ro"]);
    done(&run(&["mkdir", &format!("{}:/new", url("safe"))]));
    assert_eq!(done(&ubtrfs(["ls", &image])), "new\n");
}

#[test]
fn wrong_urls_and_absent_exports_are_one_line_each() {
    if !capability::program("qemu-nbd") {
        return;
    }
    let bed = Bed::new();
    let _server = Server::qemu_nbd(&bed.image("image"), &bed.path("socket"));
    let socket = text(&bed.path("socket"));
    let cases: [(&str, &[&str]); 9] = [
        ("nbd://127.0.0.1:1/x", &["cannot connect to 127.0.0.1:1", "check that the server runs"]),
        ("nbd+unix:///x?socket=/nowhere/s", &["cannot connect to /nowhere/s", "No such file"]),
        (&format!("nbd+unix:///other?socket={socket}"), &["has no export 'other', but 'disk'"]),
        ("nbds://host/x?tls=1", &["the unknown parameter 'tls'", "tls-certificates=DIR"]),
        ("nbd://user:secret@host/x", &["leave it out"]),
        ("nbd+unix:///x", &["names no socket"]),
        ("nbd://host:99999/x", &["a wrong port"]),
        ("nbd://host/x?tls=1", &["the unknown parameter 'tls'"]),
        ("nbd+vsock://1/x", &["an unknown kind of NBD address"]),
    ];
    for (url, words) in cases {
        for output in [ubtrfs(["tune", "-S1", url]), ubtrfs(["mkfs", url]), ubtrfs(["ls", &format!("{url}:/")])] {
            refused(&output, words);
            assert!(!String::from_utf8_lossy(&output.stderr).contains("secret"));
        }
    }
}

#[test]
fn an_export_smaller_than_its_filesystem_is_refused() {
    if !capability::program("qemu-nbd") {
        return;
    }
    let bed = Bed::new();
    let image = bed.image("image");
    done(&ubtrfs(["mkfs", "-q", &text(&image)]));
    File::options().write(true).open(&image).unwrap().set_len(200 << 20).unwrap();
    let _server = Server::qemu_nbd(&image, &bed.path("socket"));
    refused(&without_note(ubtrfs(["mkdir", &format!("{}:/d", bed.url("socket"))])), &["209715200", "419430400"]);
}

#[test]
fn an_export_has_one_writer_on_this_machine() {
    if !capability::program("qemu-nbd") || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let _server = Server::qemu_nbd(&bed.image("image"), &bed.path("socket"));
    let (url, dir) = (bed.url("socket"), bed.mount_point());
    std::os::unix::fs::symlink(bed.path("socket"), bed.path("link")).unwrap();
    done(&ubtrfs(["mkfs", "-q", &url]));
    done(&ubtrfs(["mount", &url, &text(&dir)]));
    for url in [&url, &bed.url("link")] {
        refused(&ubtrfs(["mkdir", &format!("{url}:/d")]), &["is in use by pid ", "mount --serve"]);
        refused(&ubtrfs(["ls", url]), &["is in use by pid "]);
        refused(&ubtrfs(["mkfs", "-f", url]), &["is in use by pid "]);
    }
    // The same name is found in the table of mounts.
    refused(&ubtrfs(["ls", &url]), &[&format!("work in {0}, or unmount it with: ubtrfs umount {0}", text(&dir))]);
    fs::write(dir.join("f"), "text").unwrap();
    done(&ubtrfs(["sync", &text(&dir)]));
    // The last commit can be read beside the writer.
    let beside = ubtrfs(["check", "--force", &url]);
    assert!(beside.status.success(), "{}", String::from_utf8_lossy(&beside.stderr));
    done(&ubtrfs(["umount", &text(&dir)]));
    assert_eq!(done(&ubtrfs(["ls", &bed.url("link")])), "f\n");
}

#[test]
fn exports_join_a_filesystem_and_replace_its_devices() {
    if !capability::program("qemu-nbd") || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let names = ["a", "b", "c"];
    let _servers = names.map(|name| Server::qemu_nbd(&bed.image(name), &bed.path(&format!("{name}.socket"))));
    let [a, b, c] = names.map(|name| bed.url(&format!("{name}.socket")));
    let (image, dir) = (text(&bed.image("image")), bed.mount_point());
    done(&ubtrfs(["mkfs", "-q", &image]));
    done(&ubtrfs(["import", &text(&archive(&bed)), &format!("{image}:/")]));
    // To an image without a mount.
    assert!(done(&ubtrfs(["device", "add", &a, &image])).contains("is device 2 now"));
    // A command that fails changes nothing.
    let relative = format!("nbd+unix:///disk?socket={}", "b.socket");
    let absent = bed.url("nowhere.socket");
    let mounted = |words: &[&str]| {
        let all = words.iter().copied().chain([dir.to_str().unwrap()]).collect::<Vec<_>>();
        ubtrfs(all)
    };
    done(&ubtrfs(["mount", &image, &a, &text(&dir)]));
    refused(&mounted(&["device", "add", &relative]), &["give whole paths"]);
    refused(&mounted(&["device", "add", &absent]), &["cannot connect to"]);
    refused(&without_note(mounted(&["device", "add", &a])), &["is a device of this filesystem already"]);
    fs::write(bed.path("b"), vec![3; 1 << 20]).unwrap();
    File::options().write(true).open(bed.path("b")).unwrap().set_len(400 << 20).unwrap();
    refused(&without_note(mounted(&["device", "add", &b])), &["is an export with content", "use -f"]);
    refused(&without_note(mounted(&["device", "add", &b, &c])), &["is an export with content", "nothing was added"]);
    // To a mount, which goes on.
    assert!(done(&mounted(&["device", "add", "-f", &b])).contains("is device 3 now"));
    done(&mounted(&["device", "remove", &a]));
    done(&mounted(&["replace", "start", "-B", "1", &c]));
    fs::write(dir.join("late"), vec![9; 3 << 20]).unwrap();
    let usage = done(&mounted(&["device", "usage"]));
    assert!(
        [&b, &c].iter().all(|url| usage.contains(*url)) && !usage.contains(&a) && !usage.contains(&image),
        "{usage}"
    );
    done(&ubtrfs(["umount", &text(&dir)]));
    assert_eq!(done(&ubtrfs(["ls", "-o", &format!("device={b}"), &c])), "etc\nlarge\nlate\n");
    assert!(done(&ubtrfs(["check", "--check-data-csum", &c, &b])).contains("clean"));
    drop(_servers);
    btrfs_check_array(&[bed.path("c"), bed.path("b")]).unwrap();
}

#[test]
fn zeros_take_no_space_behind_a_server_that_writes_them() {
    if !capability::program("qemu-nbd") || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let (image, url, dir) = (bed.image("image"), bed.url("socket"), bed.mount_point());
    let _server = Server::qemu_nbd(&image, &bed.path("socket"));
    done(&ubtrfs(["mkfs", "-q", &url]));
    done(&ubtrfs(["mount", &url, &text(&dir)]));
    fs::write(dir.join("zeros"), vec![0; 64 << 20]).unwrap();
    done(&ubtrfs(["umount", &text(&dir)]));
    let copy = bed.path("copy");
    done(&ubtrfs(["cp", &format!("{url}:/zeros"), &text(&copy)]));
    assert!(fs::read(&copy).unwrap() == vec![0; 64 << 20]);
    let used = fs::metadata(&image).unwrap().blocks() * 512;
    assert!(used < 16 << 20, "{used} bytes for a file of zeros");
    assert!(done(&ubtrfs(["check", "--check-data-csum", &url])).contains("clean"));
}

#[test]
fn superblocks_are_durable_without_a_flush_of_their_own() {
    if !capability::program("nbdkit") {
        return;
    }
    let bed = Bed::new();
    let (image, socket, url, log) =
        (text(&bed.image("image")), bed.path("socket"), bed.url("socket"), bed.path("requests"));
    let words = ["-f", "-U", &text(&socket), "--filter=log", "file", &image, &format!("logfile={}", text(&log))];
    let _server = Server::start("nbdkit", &words.map(str::to_owned), &socket);
    done(&ubtrfs(["mkfs", "-q", &url]));
    let before = fs::read_to_string(&log).unwrap().len();
    done(&ubtrfs(["mkdir", &format!("{url}:/d")]));
    let requests = fs::read_to_string(&log).unwrap().split_off(before);
    let primary: Vec<&str> =
        requests.lines().filter(|line| line.contains(" Write ") && line.contains("offset=0x10000 ")).collect();
    assert!(!primary.is_empty() && primary.iter().all(|line| line.contains("fua=1")), "{requests}");
}

#[test]
fn nobody_keeps_root_from_an_export_and_root_keeps_root() {
    if !capability::program("qemu-nbd") || !capability::root() || !capability::program("perl") {
        return;
    }
    let bed = Bed::new();
    let _server = Server::qemu_nbd(&bed.image("image"), &bed.path("socket"));
    let (url, dir) = (bed.url("socket"), bed.mount_point());
    done(&ubtrfs(["mkfs", "-q", &url]));
    done(&ubtrfs(["mount", &url, &text(&dir)]));
    // A process of root in another network namespace does not see the socket, and sees the lock.
    let own = command(["mkdir", &format!("{url}:/other")]);
    let elsewhere = Command::new("unshare").arg("-n").arg(own.get_program()).args(own.get_args()).output().unwrap();
    refused(&elsewhere, &["is in use"]);
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let stat = fs::metadata(bed.path("socket")).unwrap();
    let is_its = |name: &&str| name.starts_with("@ubtrfs-nbd-") && name.contains(&format!("-{:x}-", stat.ino()));
    let name = sockets.lines().filter_map(|line| line.split_whitespace().last()).find(is_its).unwrap()[1..].to_owned();
    done(&ubtrfs(["umount", &text(&dir)]));
    // An ordinary user holds the name, with a queue that is soon full, or without listening.
    for listens in ["listen(S, 0);", ""] {
        let program = format!(
            "$| = 1; socket(S, AF_UNIX, SOCK_STREAM, 0); bind(S, pack_sockaddr_un(\"\\0$ARGV[0]\")) or die; {listens} \
             print \"1\\n\"; sleep 60"
        );
        let mut squatter = Command::new(NOBODY[0])
            .args(&NOBODY[1..])
            .args(["perl", "-MSocket", "-e", &program, &name])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(squatter.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "1\n");
        let squatted = Squatter(squatter);
        done(&ubtrfs(["mount", &url, &text(&dir)]));
        refused(&ubtrfs(["mkdir", &format!("{url}:/other")]), &["is in use"]);
        done(&ubtrfs(["umount", &text(&dir)]));
        assert_eq!(done(&ubtrfs(["ls", &url])), "");
        drop(squatted);
    }
}

/// A process that is killed when this is dropped.
struct Squatter(Child);

impl Drop for Squatter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_confined_server_uses_an_export() {
    if !capability::program("qemu-nbd") || !capability::fuse() || !capability::root() {
        return;
    }
    let_users_mount();
    let bed = Bed::new();
    let mut server = Server::qemu_nbd(&bed.image("image"), &bed.path("socket"));
    let (url, dir) = (bed.url("socket"), bed.mount_point());
    done(&ubtrfs(["mkfs", "-q", "--root-owner=65534:65534", &url]));
    for path in [bed.dir.path(), &dir, &bed.path("socket")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let as_nobody = |words: &[&str]| {
        let own = command(words);
        let mut command = Command::new(NOBODY[0]);
        command.args(&NOBODY[1..]).arg(own.get_program()).args(own.get_args());
        command.stdin(Stdio::null()).output().unwrap()
    };
    done(&as_nobody(&["mount", &url, &text(&dir)]));
    let server_pid = crate::common::server_of(&dir);
    let status = fs::read_to_string(format!("/proc/{server_pid}/status")).unwrap();
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "{status}");
    done(&as_nobody(&["umount", &text(&dir)]));
    // Root's confined server, whose NBD server ends.
    done(&ubtrfs(["mount", "--sandbox", &url, &text(&dir)]));
    fs::write(dir.join("large"), vec![7; 8 << 20]).unwrap();
    File::open(dir.join("large")).unwrap().sync_all().unwrap();
    server.kill();
    fs::write(dir.join("lost"), "text").unwrap_or_default();
    let synced = File::open(dir.join("lost")).and_then(|file| file.sync_all());
    assert!(synced.is_err(), "a lost connection is a failed flush");
    let _ = ubtrfs(["umount", &text(&dir)]);
    assert!(done(&ubtrfs(["check", &text(&bed.path("image"))])).contains("clean"));
}

/// Replaces files in a directory: writes a new one, fsyncs it, renames it over the old one, fsyncs the directory. Then it
/// notes the number. Ends with status 0 when the file `stop` exists, and with status 3 when a call fails.
const WRITER: &str = r"
import os, sys
root, log, stop = sys.argv[1:]
log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
try:
    os.mkdir(root)
    directory = os.open(root, os.O_RDONLY)
    n = 0
    while not os.path.exists(stop):
        n += 1
        fd = os.open(root + '/new', os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, b'%016d' % n * (1 + n * 37 % 3000))
        os.fsync(fd)
        os.close(fd)
        os.rename(root + '/new', root + '/f%d' % (n % 16))
        os.fsync(directory)
        os.write(log, b'%d\n' % n)
        if n % 5 == 0: open(root + '/f%d' % (n % 16), 'rb').read()
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
";

/// A running [`WRITER`] in the directory `files` of a mount.
struct Writer {
    child: Child,
    log: PathBuf,
    stop: PathBuf,
}

impl Writer {
    fn start(bed: &Bed, root: &Path) -> Self {
        let (log, stop) = (bed.path("log"), bed.path("stop"));
        let _ = fs::remove_file(&stop);
        let mut command = Command::new("python3");
        command.args(["-c", WRITER, &text(root), &text(&log), &text(&stop)]).stdin(Stdio::null()).stderr(Stdio::null());
        Self { child: command.spawn().unwrap(), log, stop }
    }

    /// Waits until the writer ends, at most a minute.
    fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            if begun.elapsed() > Duration::from_secs(60) {
                let _ = self.child.kill();
                panic!("the writer hangs");
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Waits for so many promises, at most half a minute.
    fn await_promises(&self, wanted: u64) {
        let begun = Instant::now();
        while self.promised() < wanted && begun.elapsed() < Duration::from_secs(30) {
            sleep(Duration::from_millis(5));
        }
    }

    /// The last number that was promised.
    fn promised(&self) -> u64 {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().last().map_or(0, |line| line.parse().unwrap())
    }
}

/// Fails unless a directory has the content of the last promise of each file, or of the change after it.
fn verify(files: &Path, promised: u64) {
    for slot in 0..16u64 {
        let Some(last) = (promised.saturating_sub(15)..=promised).find(|n| *n > 0 && n % 16 == slot) else { continue };
        let found = fs::read(files.join(format!("f{slot}"))).unwrap_or_else(|error| panic!("f{slot}: {error}"));
        let content = |n: u64| format!("{n:016}").repeat(usize::try_from(1 + n * 37 % 3000).unwrap()).into_bytes();
        let is_next = promised + 1 == last + 16 && found == content(last + 16);
        assert!(is_next || found == content(last), "f{slot} lacks the content of {last}; {promised} was promised");
    }
}

fn rounds(default: u32) -> u32 {
    std::env::var("UBTRFS_NBD_ROUNDS").map_or(default, |rounds| rounds.parse().unwrap())
}

fn has_loss_bed() -> bool {
    capability::program("qemu-nbd") && capability::program("python3") && capability::fuse()
}

#[test]
fn everything_promised_is_there_after_the_server_was_killed() {
    if !has_loss_bed() {
        return;
    }
    let bed = Bed::new();
    let (image, socket, url) = (bed.image("image"), bed.path("socket"), bed.url("socket"));
    let dir = bed.mount_point();
    done(&ubtrfs(["mkfs", "-q", &text(&image)]));
    let (mut rng, mut nr_promised) = (Rng::new(Rng::seed_or(35)), 0);
    for round in 0..rounds(20) {
        let mut server = Server::qemu_nbd(&image, &socket);
        done(&ubtrfs(["mount", &url, &text(&dir)]));
        let mut writer = Writer::start(&bed, &dir.join(format!("round{round}")));
        sleep(Duration::from_millis(100 + rng.below(400)));
        writer.await_promises(rng.below(5));
        server.kill();
        assert_eq!(writer.wait().code(), Some(3), "round {round}: a write succeeds without a server");
        let unmounted = ubtrfs(["umount", &text(&dir)]);
        let said = String::from_utf8_lossy(&unmounted.stderr).into_owned();
        assert!(unmounted.status.success() || said.contains("may be lost"), "round {round}: {said}");
        // From the file: first as it was left, then with its log replayed.
        done(&ubtrfs(["check", &text(&image)]));
        let (copy, promised) = (bed.path("copy"), writer.promised());
        if promised > 0 {
            done(&ubtrfs(["cp", "-r", &format!("{}:/round{round}", text(&image)), &text(&copy)]));
            verify(&copy, promised);
            fs::remove_dir_all(&copy).unwrap();
        }
        nr_promised += promised;
        done(&ubtrfs(["rm", "-rf", &format!("{}:/round{round}", text(&image))]));
        if round % 5 == 0 && capability::program("btrfs") {
            btrfs_check(&image).unwrap();
        }
    }
    assert!(nr_promised > 20, "only {nr_promised} promises");
}

#[test]
fn programs_notice_nothing_when_one_server_of_a_raid1_is_killed() {
    if !has_loss_bed() {
        return;
    }
    let bed = Bed::new();
    let images = [bed.image("one"), bed.image("two")];
    let sockets = [bed.path("one.socket"), bed.path("two.socket")];
    let urls = [bed.url("one.socket"), bed.url("two.socket")];
    let dir = bed.mount_point();
    let mut rng = Rng::new(Rng::seed_or(35));
    for round in 0..rounds(5) {
        let mut servers = [0, 1].map(|nr| Server::qemu_nbd(&images[nr], &sockets[nr]));
        done(&ubtrfs(["mkfs", "-q", "-f", "-d", "raid1", "-m", "raid1", &urls[0], &urls[1]]));
        done(&ubtrfs(["mount", &urls[0], &urls[1], &text(&dir)]));
        let mut writer = Writer::start(&bed, &dir.join("files"));
        sleep(Duration::from_millis(200 + rng.below(400)));
        let before = writer.promised();
        let lost = usize::try_from(rng.below(2)).unwrap();
        servers[lost].kill();
        writer.await_promises(before + 20);
        fs::write(&writer.stop, "").unwrap();
        let ended = writer.wait();
        assert!(ended.success(), "round {round}, server {lost}: {ended}");
        let promised = writer.promised();
        assert!(promised >= before + 20, "round {round}, server {lost}: {promised} promises, and {before} before");
        verify(&dir.join("files"), promised);
        done(&ubtrfs(["umount", &text(&dir)]));
        // The other server's image has all of it.
        let (left, lost_path) = (text(&images[1 - lost]), images[lost].with_extension("lost"));
        fs::rename(&images[lost], &lost_path).unwrap();
        let succeeded = |output: &Output| assert!(output.status.success(), "{output:?}");
        succeeded(&ubtrfs(["check", "-o", "degraded", &left]));
        let copy = bed.path("copy");
        succeeded(&ubtrfs(["cp", "-o", "degraded", "-r", &format!("{left}:/files"), &text(&copy)]));
        verify(&copy, promised);
        fs::remove_dir_all(&copy).unwrap();
        fs::rename(&lost_path, &images[lost]).unwrap();
        if round > 0 {
            continue;
        }
        // With both servers, the one that was lost is brought up to date.
        let _again = Server::qemu_nbd(&images[lost], &sockets[lost]);
        let mounted = ubtrfs(["mount", &urls[0], &urls[1], &text(&dir)]);
        let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
        assert!(mounted.status.success() && said.contains("missed changes"), "{said}");
        verify(&dir.join("files"), promised);
        let begun = Instant::now();
        while done(&ubtrfs(["device", "usage", &text(&dir)])).contains("updated") {
            assert!(begun.elapsed() < Duration::from_secs(30), "the device is not brought up to date");
            sleep(Duration::from_millis(50));
        }
        done(&ubtrfs(["umount", &text(&dir)]));
        assert!(done(&ubtrfs(["check", "--check-data-csum", &urls[0], &urls[1]])).contains("clean"));
    }
}
