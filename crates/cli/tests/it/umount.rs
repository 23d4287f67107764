//! Tests of obstacles to mounting and unmounting: other users at the control socket, a dead mount, a filesystem that
//! can only be read, an unknown option. Also tests the mode of a new image.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_format::CsumType;
use ubtrfs_testkit::{Image, btrfs_check, capability, run};

use crate::common::{namespace, ok, refused};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

fn ubtrfs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", UBTRFS]).args(args).env("LC_ALL", "C").stdin(Stdio::null());
    command.output().unwrap()
}

fn mount(image: &Path) -> TempDir {
    let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    ok(ubtrfs([OsStr::new("mount"), image.as_os_str(), dir.path().as_os_str()]));
    dir
}

fn umount(dir: &Path) -> Output {
    ubtrfs([OsStr::new("umount"), dir.as_os_str()])
}

/// Connects as often as possible to each control socket that it finds, keeps the connections, and keeps trying.
const FLOOD: &str = r#"
import os, socket
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
names = [line.split()[-1] for line in open("/proc/net/unix") if "@ubtrfs-" in line]
assert names
held, said = [], False
while True:
    for name in names:
        try:
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect("\0" + name[1:])
            held.append(one)
        except OSError:
            pass
    if len(held) > 800:
        del held[:400]
        if not said:
            said = True
            print("full", flush=True)
"#;

#[test]
fn connections_of_other_users_do_not_hold_up_umount() {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("python3") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let dir = mount(image.path());
    std::fs::write(dir.path().join("file"), b"content").unwrap();
    let mut flood = Command::new("python3").args(["-c", FLOOD]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(flood.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let begun = Instant::now();
    let output = umount(dir.path());
    let took = begun.elapsed();
    flood.kill().unwrap();
    flood.wait().unwrap();
    assert_eq!(line, "full\n");
    ok(output);
    assert!(took < Duration::from_secs(20), "{took:?}");
    btrfs_check(image.path()).unwrap();
}

#[test]
fn unmounting_what_could_only_be_read_loses_nothing() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    // Set an unknown compat_ro feature: the filesystem may be read, but not written.
    const SUPERBLOCK: u64 = 64 << 10;
    let mut superblock = image.read_at(SUPERBLOCK, 4096).unwrap();
    superblock[180 + 7] |= 0x40;
    let csum = CsumType::Crc32c.compute(&superblock[32..]);
    superblock[..32].copy_from_slice(&csum);
    image.write_at(SUPERBLOCK, &superblock).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let mounted = ubtrfs([OsStr::new("mount"), image.path().as_os_str(), dir.path().as_os_str()]);
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    assert!(mounted.status.success() && said.contains("mounted read-only"), "{said}");
    assert_eq!(
        std::fs::write(dir.path().join("file"), b"x").unwrap_err().raw_os_error(),
        Some(Errno::ROFS.raw_os_error())
    );
    ok(umount(dir.path()));
}

/// The messages name the reason, because another writer, a full host disk and a bad device all give EIO and EROFS.
#[test]
fn a_mount_that_turned_read_only_says_why_to_sync_snapshot_and_umount() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let scratch = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let path = scratch.path().join("image");
    ok(ubtrfs([OsStr::new("mkfs"), OsStr::new("-q"), OsStr::new("-b"), OsStr::new("256M"), path.as_os_str()]));
    let dir = mount(&path);
    std::fs::write(dir.path().join("file"), b"content").unwrap();
    std::fs::remove_file(&path).unwrap();
    let sync = || ubtrfs([OsStr::new("sync"), dir.path().as_os_str()]);
    // The first sync finds that the image was removed. From then on, the filesystem is read-only, and later errors give
    // the removal as the reason.
    refused(&sync(), &["not everything", "the image was removed", "unmount it"]);
    refused(&sync(), &["has turned read-only", "the image was removed"]);
    let words = ["subvolume", "snapshot"].map(OsStr::new);
    let snapshot = dir.path().join("snapshot");
    let made = ubtrfs(words.into_iter().chain([dir.path().as_os_str(), snapshot.as_os_str()]));
    refused(&made, &["has turned read-only", "the image was removed"]);
    assert!(!String::from_utf8_lossy(&made.stderr).contains("set-read-only"), "it is no property of the subvolume");
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"content", "it can still be copied out");
    refused(&umount(dir.path()), &["is unmounted", "may be lost", "the image was removed"]);
}

#[test]
fn mounting_over_a_dead_mount_says_how_to_take_it_away() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let mut server = Command::new(UBTRFS)
        .args([OsStr::new("mount"), OsStr::new("-f"), image.path().as_os_str(), dir.path().as_os_str()])
        .spawn()
        .unwrap();
    let mounted = || std::fs::read_to_string("/proc/self/mounts").unwrap().contains(&*dir.path().to_string_lossy());
    let begun = Instant::now();
    while !mounted() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    server.kill().unwrap();
    server.wait().unwrap();
    let again = ubtrfs([OsStr::new("mount"), image.path().as_os_str(), dir.path().as_os_str()]);
    refused(&again, &["server has ended", "ubtrfs umount"]);
    refused(&umount(dir.path()), &["last commit is intact"]);
    assert!(!mounted());
    let dir = mount(image.path());
    ok(umount(dir.path()));
}

#[test]
fn an_unknown_option_leads_to_the_list_of_those_that_are_known() {
    let refusal = ubtrfs(["mount", "-o", "frobnicate", "/nonexistent.img", "/tmp"]);
    refused(&refusal, &["frobnicate", "ubtrfs mount --help"]);
    let help = ok(ubtrfs(["mount", "--help"]));
    for option in ["subvolid=ID", "user_subvol_rm_allowed", "nologreplay", "writeback_cache", "noallow_other"] {
        assert!(help.contains(option), "{option}: {help}");
    }
}

#[test]
fn only_the_owner_can_read_a_new_image() {
    let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mode = |name: &str| std::fs::metadata(path(name)).unwrap().permissions().mode() & 0o7777;
    let open_umask = |words: &[&str]| {
        let script = "umask 0; exec \"$@\"";
        let output = Command::new("sh").args(["-c", script, "sh", UBTRFS]).args(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    open_umask(&["mkfs", "-q", "-b", "256M", &path("made.img")]);
    let tar = ["-cf", &path("source.tar"), "-C", &path(""), "made.img"];
    ok(Command::new("tar").args(tar).output().unwrap());
    open_umask(&["import", "--create=1G", &path("source.tar"), &format!("{}:/", path("imported.img"))]);
    assert_eq!((mode("made.img"), mode("imported.img")), (0o600, 0o600));
    // Make an empty file whose owner chose another mode.
    std::fs::write(path("shared.img"), b"").unwrap();
    std::fs::set_permissions(path("shared.img"), std::fs::Permissions::from_mode(0o640)).unwrap();
    open_umask(&["mkfs", "-q", "-b", "256M", &path("shared.img")]);
    assert_eq!(mode("shared.img"), 0o640);
    if capability::fuse() {
        std::fs::create_dir(path("m")).unwrap();
        open_umask(&["mount", "--create=256M", &path("mounted.img"), &path("m")]);
        ok(umount(Path::new(&path("m"))));
        assert_eq!(mode("mounted.img"), 0o600);
    }
}

/// Makes a mount of `nobody`, which admits only nobody.
fn mount_of_nobody() -> Option<(TempDir, std::path::PathBuf)> {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("setpriv") {
        return None;
    }
    crate::common::let_users_mount();
    let scratch = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let dir = scratch.path().join("m");
    std::fs::create_dir(&dir).unwrap();
    std::fs::copy(UBTRFS, scratch.path().join("ubtrfs")).unwrap();
    for path in [scratch.path(), &dir] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    let words = ["mkfs -q -b 256M a.img", "mount a.img m"];
    for line in words {
        let mut command = Command::new(crate::common::NOBODY[0]);
        command.args(&crate::common::NOBODY[1..]).arg("./ubtrfs").args(line.split(' ')).current_dir(scratch.path());
        ok(command.stdin(Stdio::null()).output().unwrap());
    }
    Some((scratch, dir))
}

#[test]
fn root_unmounts_the_mount_of_another_user_and_waits_for_its_commit() {
    let Some((scratch, dir)) = mount_of_nobody() else { return };
    assert_eq!(std::fs::read_dir(&dir).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied, "root stays out");
    let script = "echo content > m/file";
    let mut write = Command::new(crate::common::NOBODY[0]);
    ok(write
        .args(&crate::common::NOBODY[1..])
        .args(["sh", "-c", script])
        .current_dir(scratch.path())
        .output()
        .unwrap());
    ok(umount(&dir));
    // The server has ended, so the image is free and complete.
    let file = format!("{}:/file", scratch.path().join("a.img").display());
    assert_eq!(ok(ubtrfs(["cat", &file])), "content\n");
}

#[test]
fn root_is_told_why_it_cannot_enter_the_mount_of_another_user() {
    let Some((_scratch, dir)) = mount_of_nobody() else { return };
    let at = dir.display().to_string();
    for words in [&["subvolume", "list"][..], &["sync"], &["stats"], &["filesystem", "df"], &["balance", "status"]] {
        let output = ubtrfs(words.iter().copied().chain([&*at]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.lines().count() == 1, "{words:?}: {said}");
        assert!(said.contains("only user 65534") && said.contains("setpriv --reuid=65534"), "{words:?}: {said}");
    }
    refused(&ubtrfs(["subvolume", "create", &format!("{at}/s")]), &["only user 65534", "setpriv --reuid=65534"]);
    ok(umount(&dir));
}

#[test]
fn a_mount_in_another_mount_namespace_is_not_waited_for() {
    if !capability::fuse() {
        return;
    }
    for kills in [false, true] {
        let image = Image::kernel_made(512 << 20, &[]).unwrap();
        let dir = mount(image.path());
        fs::write(dir.path().join("f"), "content").unwrap();
        let mut other = namespace(dir.path());
        let mut other =
            other.args(["sh", "-c", "echo; read end"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(other.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        let server = crate::common::server_of(dir.path());
        let (process, remedy) = (format!("process {} (sh)", other.id()), format!("kill {server}"));
        refused(&umount(dir.path()), &["is unmounted, but", &process, "in another mount namespace", &remedy]);
        let list = || ubtrfs([OsStr::new("ls"), format!("{}:/", image.path().display()).as_ref()]);
        refused(&list(), &["in use"]);
        if kills {
            run("kill", [&server.to_string()]).unwrap();
        } else {
            drop(other.stdin.take());
        }
        let begun = Instant::now();
        while !list().status.success() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the server ends");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(ok(list()), "f\n");
        drop(other.stdin.take());
        other.wait().unwrap();
        btrfs_check(image.path()).unwrap();
    }
}

#[test]
fn the_second_of_two_unmounts_says_that_nothing_is_mounted() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    for _ in 0..5 {
        let dir = mount(image.path());
        let spawn = || {
            let mut command = Command::new(UBTRFS);
            command.arg("umount").arg(dir.path()).stdin(Stdio::null()).stderr(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().unwrap()
        };
        let both = [spawn(), spawn()].map(|child| child.wait_with_output().unwrap());
        assert!(both.iter().any(|output| output.status.success()), "{both:?}");
        for output in both.iter().filter(|output| !output.status.success()) {
            refused(output, &["is not a mount of ubtrfs"]);
        }
    }
    btrfs_check(image.path()).unwrap();
}

/// Fills the filesystem, then writes all of a sparse file through a mapping and closes the file without fsync.
const FILL_AND_MAP: &str = r#"
import mmap, os
sparse = os.open("sparse", os.O_CREAT | os.O_RDWR)
os.ftruncate(sparse, 8 << 20)
fill = os.open("fill", os.O_CREAT | os.O_WRONLY)
for size in (1 << 20, 4096):
    try:
        while os.write(fill, os.urandom(size)):
            pass
    except OSError:
        pass
mapped = mmap.mmap(sparse, 8 << 20)
os.close(sparse)
for page in range(0, 8 << 20, 4096):
    mapped[page:page + 4096] = os.urandom(4096)
mapped.close()
"#;

/// The kernel accepts stores to a mapping before the server gets them. If the server has no space for them, a program
/// that does not call fsync gets no error, so umount must report the loss.
#[test]
fn umount_names_a_file_whose_mapped_pages_found_no_space() {
    if !capability::fuse() || !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(160 << 20, &[]).unwrap();
    let fill_and_map = |dir: &Path| {
        ok(Command::new("python3").args(["-c", FILL_AND_MAP]).current_dir(dir).output().unwrap());
    };
    let dir = mount(image.path());
    fill_and_map(dir.path());
    refused(&umount(dir.path()), &["is unmounted", "pages of '/sparse'", "from offset", "No space left"]);
    btrfs_check(image.path()).unwrap();
    // Nothing is lost if the file is deleted.
    let dir = mount(image.path());
    std::fs::remove_file(dir.path().join("fill")).unwrap();
    std::fs::remove_file(dir.path().join("sparse")).unwrap();
    fill_and_map(dir.path());
    refused(&ubtrfs([OsStr::new("sync"), dir.path().as_os_str()]), &["could not hand over"]);
    std::fs::remove_file(dir.path().join("sparse")).unwrap();
    ok(umount(dir.path()));
    btrfs_check(image.path()).unwrap();
}

/// What limits the space of mapped pages.
#[derive(Clone, Copy, PartialEq)]
enum Limit {
    Disk,
    Quota,
}

/// The program that stored the pages gets no error, so the loss is told in other ways as soon as the server knows it.
fn stats_the_log_and_umount_name_lost_pages(limit: Limit) {
    if !capability::fuse() || !capability::kernel_oracle() || !capability::program("python3") {
        return;
    }
    let image = Image::kernel_made(160 << 20, &[]).unwrap();
    let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let mut server = Command::new(UBTRFS);
    server.args([OsStr::new("mount"), OsStr::new("-f"), image.path().as_os_str(), dir.path().as_os_str()]);
    let mut server = server.stderr(Stdio::piped()).spawn().unwrap();
    let stats = || ubtrfs([OsStr::new("stats"), OsStr::new("--json"), dir.path().as_os_str()]);
    let begun = Instant::now();
    while !stats().status.success() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    let (file, error) = match limit {
        Limit::Disk => ("/sparse", "No space left"),
        Limit::Quota => ("/limited/sparse", "quota exceeded"),
    };
    let at = dir.path().join(&file[1..]);
    let within = at.parent().unwrap();
    if limit == Limit::Quota {
        let within = within.as_os_str();
        ok(ubtrfs([OsStr::new("subvolume"), OsStr::new("create"), within]));
        ok(ubtrfs([OsStr::new("quota"), OsStr::new("enable"), dir.path().as_os_str()]));
        ok(ubtrfs([OsStr::new("qgroup"), OsStr::new("limit"), OsStr::new("4M"), within]));
    }
    ok(Command::new("python3").args(["-c", FILL_AND_MAP]).current_dir(within).output().unwrap());
    let told: serde_json::Value = serde_json::from_str(&ok(stats())).unwrap();
    let shown = ok(ubtrfs([OsStr::new("stats"), dir.path().as_os_str()]));
    let mut log = BufReader::new(server.stderr.take().unwrap()).lines();
    let (send, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = send.send(log.next());
        log.for_each(drop);
    });
    let line = lines.recv_timeout(Duration::from_secs(20));
    refused(&umount(dir.path()), &["is unmounted", &format!("pages of '{file}'"), "from offset", error]);
    server.wait().unwrap();
    let line = line.expect("the log names the file before the unmount").unwrap().unwrap();
    for word in [&format!("pages of '{file}'"), "from offset", error] {
        assert!(line.contains(word), "{word}: {line}");
    }
    assert_eq!(told["files_with_lost_pages"], 1.0);
    let lost = &told["files"][0];
    assert_eq!((&lost["file"], lost["error"].as_str().unwrap().contains(error)), (&file.into(), true), "{told}");
    let [bytes, start, end] = ["lost_bytes", "lost_start", "lost_end"].map(|name| lost[name].as_f64().unwrap());
    assert!(0.0 < bytes && start < end && end <= f64::from(8 << 20), "{told}");
    assert!(shown.contains(file), "{shown}");
    btrfs_check(image.path()).unwrap();
}

#[test]
fn stats_and_the_log_name_the_file_and_the_range_of_lost_pages_at_once() {
    stats_the_log_and_umount_name_lost_pages(Limit::Disk);
}

#[test]
fn pages_that_are_lost_at_a_quota_limit_are_named_like_those_on_a_full_disk() {
    stats_the_log_and_umount_name_lost_pages(Limit::Quota);
}

/// A FUSE server that mounts as the user nobody and then reads all requests, but answers none of them.
const SILENT: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open("/dev/fuse", os.O_RDWR)
data = f"fd={fd},rootmode=40000,user_id=65534,group_id=65534{sys.argv[2]}"
if libc.mount(sys.argv[3].encode(), sys.argv[1].encode(), b"fuse.ubtrfs", 0, data.encode()):
    raise OSError(ctypes.get_errno())
while True:
    request = os.read(fd, 1 << 20)
    _, opcode, unique = struct.unpack_from("=IIQ", request)
    if opcode == 26:
        init = struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, 4096, 1, 1, 0, 0)
        os.write(fd, struct.pack("=IiQ", 16 + len(init), 0, unique) + init)
        print("mounted", flush=True)
"#;

/// A mount whose server answers nothing. The server ends when this value is dropped, which ends all processes that
/// wait for it.
struct SilentMount {
    server: std::process::Child,
    dir: TempDir,
    /// The mount point: `dir`, or a directory below it.
    at: PathBuf,
}

impl SilentMount {
    fn new(options: &str, source: &str) -> Self {
        Self::below("", options, source)
    }

    fn below(path: &str, options: &str, source: &str) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-umount-").unwrap();
        let at = dir.path().join(path);
        std::fs::create_dir_all(&at).unwrap();
        let mut command = Command::new("python3");
        command.args(["-c", SILENT]).arg(&at).args([options, source]).stdout(Stdio::piped());
        let mut server = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n");
        Self { server, dir, at }
    }

    fn is_mounted(&self) -> bool {
        // Other mounts may have names that are not UTF-8.
        let table = std::fs::read("/proc/self/mounts").unwrap();
        String::from_utf8_lossy(&table).contains(&*self.dir.path().to_string_lossy())
    }
}

impl Drop for SilentMount {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Runs the program. The silent server is killed if the program takes longer than 20 seconds, because a process that
/// waits for that server cannot be killed.
fn beside_silent_server<S: AsRef<OsStr>>(mount: &mut SilentMount, args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(UBTRFS);
    command.args(args).env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(20) {
            mount.server.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("it waits for the server: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn root_does_not_wait_for_a_silent_server_of_another_user() {
    if !capability::fuse() || !capability::program("python3") || !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = TempDir::with_prefix("ubtrfs-umount-").unwrap();
    let image = scratch.path().join("image");
    ok(ubtrfs([OsStr::new("mkfs"), OsStr::new("-q"), OsStr::new("-b"), OsStr::new("256M"), image.as_os_str()]));
    for (options, slash) in [("", ""), (",allow_other", ""), ("", "/")] {
        let mut mount = SilentMount::new(options, "silent");
        let at = format!("{}{slash}", mount.dir.path().display());
        let over = beside_silent_server(&mut mount, [OsStr::new("mount"), image.as_os_str(), OsStr::new(&at)]);
        refused(&over, &["silent is mounted on", "already"]);
        let remounted = beside_silent_server(&mut mount, ["mount", "-o", "remount,ro", "silent", &*at]);
        ok(remounted);
        refused(
            &beside_silent_server(&mut mount, ["mount", "-o", "remount,rw", "silent", &*at]),
            &["65534", "as that user"],
        );
        let words = ["is unmounted", "was not awaited", "run by user 65534", "within 3 s"];
        refused(&beside_silent_server(&mut mount, ["umount", &*at]), &words);
        assert!(!mount.is_mounted());
    }
}

#[test]
fn filesystem_show_leaves_out_a_server_that_does_not_answer() {
    if !capability::fuse() || !capability::program("python3") || !rustix::process::geteuid().is_root() {
        return;
    }
    // A server of root's own.
    let mut mount = SilentMount::new(",user_id=0,group_id=0,allow_other", "silent");
    let shown = beside_silent_server(&mut mount, ["filesystem", "show"]);
    assert!(shown.status.success());
    let warning = format!("{}: its server does not answer", mount.dir.path().display());
    assert!(String::from_utf8_lossy(&shown.stderr).contains(&warning), "{shown:?}");
}

/// A busy mount is the moment when a command asks the server of a mount whether a balance runs.
#[test]
fn root_is_told_at_once_that_a_silent_mount_is_busy() {
    if !capability::fuse() || !capability::program("python3") || !rustix::process::geteuid().is_root() {
        return;
    }
    let mut mount = SilentMount::new(",allow_other", "silent");
    let at = mount.dir.path().display().to_string();
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let held = rustix::fs::open(&mount.at, flags, rustix::fs::Mode::empty()).unwrap();
    let begun = Instant::now();
    refused(&beside_silent_server(&mut mount, ["umount", &*at]), &["is busy", "--lazy"]);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert!(mount.is_mounted());
    refused(&beside_silent_server(&mut mount, ["umount", "--lazy", &*at]), &["is unmounted", "was not awaited"]);
    assert!(!mount.is_mounted() && begun.elapsed() < Duration::from_secs(16), "{:?}", begun.elapsed());
    drop(held);
}

#[test]
fn root_unmounts_nothing_else_if_the_mount_point_is_replaced() {
    if !capability::fuse() || !capability::program("python3") || !rustix::process::geteuid().is_root() {
        return;
    }
    let mount = SilentMount::below("x/victim", ",allow_other", "bad\x1b]0;title\x07");
    let [base, elsewhere] = [mount.dir.path(), &mount.dir.path().join("elsewhere")];
    let victim = elsewhere.join("victim");
    std::fs::create_dir_all(&victim).unwrap();
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("victim", &victim, "tmpfs", none, None).unwrap();
    let child = Command::new(UBTRFS)
        .arg("umount")
        .arg(&mount.at)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // While the program waits for the server, the user replaces the directory that holds the mount point.
    std::thread::sleep(Duration::from_secs(1));
    rustix::mount::unmount(&mount.at, rustix::mount::UnmountFlags::DETACH).unwrap();
    std::fs::rename(base.join("x"), base.join("gone")).unwrap();
    std::os::unix::fs::symlink(elsewhere, base.join("x")).unwrap();
    let output = child.wait_with_output().unwrap();
    let is_there = std::fs::read_to_string("/proc/self/mounts").unwrap().contains(&*victim.to_string_lossy());
    let _ = rustix::mount::unmount(&victim, rustix::mount::UnmountFlags::DETACH);
    assert!(is_there, "another filesystem was unmounted");
    refused(&output, &["its mount point changed meanwhile"]);
}

/// The device in the table of mounts is a text that the user chose, so it may lead into a mount of that user.
#[test]
fn root_does_not_follow_the_device_of_another_users_mount() {
    if !capability::fuse() || !capability::program("python3") || !capability::program("losetup") {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let attached = Command::new("losetup").args(["-f", "--show"]).arg(image.path()).output().unwrap();
    let device = ok(attached).trim().to_owned();
    let mut mount = SilentMount::new(",allow_other", "silent");
    let inside = mount.dir.path().join("x").display().to_string();
    let link = tempfile::Builder::new().prefix("ubtrfs-umount-").tempdir_in("/dev/shm").unwrap();
    std::os::unix::fs::symlink(&inside, link.path().join("x")).unwrap();
    let by_link = link.path().join("x").display().to_string();
    let _others = [SilentMount::new(",allow_other", &inside), SilentMount::new(",allow_other", &by_link)];
    let checked = beside_silent_server(&mut mount, ["rescue", "super-recover", "-y", &*device]);
    let made = beside_silent_server(&mut mount, ["mkfs", "-f", "-q", &*device]);
    ok(Command::new("losetup").args(["-d", &device]).output().unwrap());
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    ok(made);
}
